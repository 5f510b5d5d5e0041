//! Limits and models of profiles, with models that decode.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use steersman::config::ServerConfig;
use steersman::models::{self, Loaded, NamedBy};
use steersman_engine::config::{Profile, ProfileLimits};
use steersman_engine::request::{FinishReason, Request};
use steersman_engine::{Error, RequestError};
use steersman_models::hub::Hub;
use steersman_tests::{Running, ask, bundled_model, config, run, tiny_model};

fn engine_with(limits: ProfileLimits) -> Running {
    let mut config = config();
    let profile = Profile { limits, ..Profile::default() };
    config.profiles.insert("limited".into(), profile);
    Running::without_store(config)
}

fn limited(question: &str, max_tokens: Option<u32>, reasoning: bool) -> Request {
    Request { profile: "limited".into(), max_tokens, reasoning: Some(reasoning), ..ask(question) }
}

#[test]
fn a_profile_limits_prompt_reasoning_and_reply_and_notes_it() {
    let limits = ProfileLimits {
        prompt_tokens: 60,
        reasoning_budget: 7,
        max_tokens: 2,
        ..ProfileLimits::default()
    };
    let engine = engine_with(limits);

    let reply = run(&engine, limited(&"one more word ".repeat(40), None, false));
    let Err(Error::Request(RequestError::PromptTooLong { tokens, limit: 60, profile })) =
        &reply.end
    else {
        panic!("{reply:?}")
    };
    assert!(*tokens > 60 && profile == "limited", "{reply:?}");

    for (max_tokens, cut) in [(None, false), (Some(4000), true)] {
        let reply = run(&engine, limited("Write a story.", max_tokens, false));
        let finished = reply.finished();
        assert_eq!((&finished.reason, finished.usage.answer_tokens), (&FinishReason::Length, 2));
        let noted = finished.notes.iter().any(|note| note.contains("limit of 2"));
        assert_eq!(noted, cut, "{:?}", finished.notes);
    }

    // Reasoning counts too.
    let reply = run(&engine, limited("Who is the tallest?", None, true));
    let finished = reply.finished();
    assert_eq!((&finished.reason, finished.usage.reply_tokens()), (&FinishReason::Length, 2));

    let limits = ProfileLimits { reasoning_budget: 7, ..ProfileLimits::default() };
    let engine = engine_with(limits);
    let reply = run(&engine, limited("Who is the tallest?", None, true));
    let usage = reply.finished().usage;
    // The hint counts as reasoning or as answer; the marker ends the reasoning.
    assert!((7..16).contains(&usage.reasoning_tokens), "{usage:?}");
    assert!(reply.finished().notes.iter().any(|note| note.contains("budget")), "{reply:?}");

    let unlimited =
        Request { profile: "default".into(), ..limited("Write a story.", Some(9), false) };
    assert!(
        run(&engine, unlimited).finished().usage.answer_tokens > 2,
        "the limits apply to one profile"
    );
}

/// The bundled model for profile `default`, and the one in `folder` for `small`.
fn two(folder: &Path, data: &Path) -> anyhow::Result<Loaded> {
    let mut config = config();
    config.store.min_tokens = 1;
    config.speculation.drafts.clear();
    config.profiles.insert("small".into(), Profile::default());
    let profile_models = [("small".into(), folder.to_str().unwrap().into())].into();
    let server = ServerConfig { profile_models, ..ServerConfig::default() };
    let config = config.check()?;
    // As a server does: other tests share compiled policies, these compile them.
    let policies = steersman_engine::policies(&config, data)?;
    models::load(config, &server, data, &policies, steersman_engine::start)
}

#[test]
fn each_model_of_a_profile_is_loaded_and_has_a_store_of_its_own() {
    let (folder, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let folder = folder.path().join("tiny");
    fs::create_dir(&folder).unwrap();
    tiny_model(&folder);
    let Loaded { models, threads, bundled } = two(&folder, data.path()).unwrap();
    assert!(bundled);
    let names: Vec<_> = models.names().into_iter().map(|name| name.name).collect();
    assert_eq!(names, ["tiny-hybrid-4bit", "tiny@small"]);
    let (first, small) = (models.first(), models.of("small").unwrap());
    assert!(Arc::ptr_eq(first.policies(), small.policies()), "all models share the policies");
    let question = "What is the capital of Peru?";
    assert_eq!(run(&first, ask(question)).answer, "The capital of Peru is Lima.");
    let request = Request { profile: "small".into(), max_tokens: Some(5), ..ask("w1 w2 w3") };
    let words = run(&small, request).answer;
    assert!(words.split_whitespace().all(|word| word.starts_with('w')), "{words}");
    drop((first, small, models));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    for file in ["state.redb", "state-tiny.redb"] {
        assert!(data.path().join(file).is_file(), "{file}");
    }
}

/// The model that drafts could be removed from the cache over HTTP: the configuration names it, and no client does.
#[test]
fn the_files_of_the_draft_model_are_those_of_the_configuration() {
    let data = tempfile::tempdir().unwrap();
    let draft = bundled_model().canonicalize().unwrap();
    let mut config = config();
    config.speculation.draft_model = draft.to_str().unwrap().into();
    let config = config.check().unwrap();
    let policies = steersman_engine::policies(&config, data.path()).unwrap();
    let server = ServerConfig::default();
    let loaded =
        models::load(config, &server, data.path(), &policies, steersman_engine::start).unwrap();
    let Loaded { models, threads, .. } = loaded;
    let folders = models.folders();
    assert!(folders.contains(&(draft, NamedBy::Configuration)), "{folders:?}");
    assert_eq!(folders.len(), 2, "and those of the model: {folders:?}");
    drop((models, policies));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// A model of the cache that an operator serves is for the profiles that have no model of their own.
#[test]
fn a_model_of_the_cache_has_the_profiles_of_the_first_model_and_a_store_of_its_own() {
    const SHA: &str = "0123456789abcdef0123456789abcdef01234567";
    let (folder, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let own = folder.path().join("tiny");
    let repo = folder.path().join("models--owner--spare");
    let snapshot = repo.join("snapshots").join(SHA);
    for folder in [&own, &snapshot] {
        fs::create_dir_all(folder).unwrap();
        tiny_model(folder);
    }
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), SHA).unwrap();
    let hub = Hub {
        endpoint: "http://127.0.0.1:1".into(),
        cache: folder.path().into(),
        token: None,
        offline: true,
    };
    let Loaded { models, threads, .. } = two(&own, data.path()).unwrap();
    // None is downloaded.
    let error = models.recipe(&hub, "owner/none").unwrap().folder().unwrap_err().to_string();
    assert!(error.contains("owner/none is not on this machine"), "{error}");
    let recipe = models.recipe(&hub, "owner/spare").unwrap();
    assert_eq!(recipe.folder().unwrap(), snapshot);
    assert!(recipe.bytes().unwrap() > 0);
    let (engine, thread) = recipe.start().unwrap();
    assert_eq!(engine.info().model, "owner/spare");
    let profiles = &engine.info().profiles;
    assert!(profiles.contains(&"default".into()), "{profiles:?}");
    assert!(!profiles.contains(&"small".into()), "it names a model: {profiles:?}");
    let words = run(&engine, Request { max_tokens: Some(5), ..ask("w1 w2 w3") }).answer;
    assert!(words.split_whitespace().all(|word| word.starts_with('w')), "{words}");
    drop((engine, recipe, models));
    threads.into_iter().chain([thread]).for_each(|thread| thread.join().unwrap());
    assert!(data.path().join("state-owner-spare.redb").is_file());
}

#[test]
fn an_error_in_loading_a_model_names_the_profile() {
    let data = tempfile::tempdir().unwrap();
    let absent = data.path().join("absent");
    let error = format!("{:#}", two(&absent, data.path()).err().expect("there is no such model"));
    assert!(error.contains("the model of profile small"), "{error}");
    assert!(error.contains("absent"), "{error}");
    let same = data.path().join("tiny-hybrid-4bit");
    fs::create_dir(&same).unwrap();
    tiny_model(&same);
    let error = format!("{:#}", two(&same, data.path()).err().expect("the name is taken"));
    let words = "the model of profile small: another model has the name tiny-hybrid-4bit already";
    assert_eq!(error, words);
}
