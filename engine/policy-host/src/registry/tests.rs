use std::fs;

use steersman_test_support::hostile::stepper;

use super::source::PARAM_BYTES;
use super::*;
use crate::config::Grant;
use crate::config::ProfilePolicies;
use crate::contract::{RequestView, no_vocabulary};
use crate::database::Storage;
use crate::error::Cause;
use crate::shipped::SHIPPED;

type Result<T, E = Error> = std::result::Result<T, E>;

fn profiles(list: &[(&str, &str)]) -> BTreeMap<String, ProfilePolicies> {
    let profile = |policy: &str| ProfilePolicies {
        policies: vec![policy.into()],
        ..ProfilePolicies::default()
    };
    list.iter().map(|(name, policy)| ((*name).into(), profile(policy))).collect()
}

fn load(list: &[(&str, &str)]) -> Result<Policies> {
    load_with(&PolicyConfig::default(), &profiles(list))
}

fn load_with(
    config: &PolicyConfig,
    profiles: &BTreeMap<String, ProfilePolicies>,
) -> Result<Policies> {
    Policies::load(config, profiles, &Storage::in_memory())
}

fn start(policies: &Policies, profile: &str) -> Result<Session> {
    policies.start(profile, "request", &no_vocabulary())
}

/// A policy without decisions, in different versions: a custom section has its name.
fn version(name: u8) -> Vec<u8> {
    let passthrough = SHIPPED.iter().find(|shipped| shipped.name == "passthrough").unwrap();
    // A custom section: id, size, and a name of one byte.
    [passthrough.component, &[0, 2, 1, name]].concat()
}

/// Activates a version as a change of its file would.
fn install(policies: &Policies, name: u8) -> Activation {
    let source = &policies.sources["mine"];
    fs::write(source.component.as_ref().unwrap(), version(name)).unwrap();
    let bundle = Bundle::open("mine", version(name), &Trust::default()).unwrap();
    policies.replace("mine", source, &bundle, Origin::File, Urgency::Awaited).unwrap()
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// A policy folder, storage, and a profile that names `mine`.
struct Site {
    folder: tempfile::TempDir,
    storage: Storage,
    profiles: BTreeMap<String, ProfilePolicies>,
}

impl Site {
    fn new() -> Self {
        let site = Self {
            folder: tempfile::tempdir().unwrap(),
            storage: Storage::in_memory(),
            profiles: profiles(&[("default", "mine")]),
        };
        fs::write(site.file(), version(b'a')).unwrap();
        site
    }

    fn file(&self) -> std::path::PathBuf {
        self.folder.path().join("mine.wasm")
    }

    fn load(&self) -> Result<Policies> {
        let folder = self.folder.path().into();
        let config = PolicyConfig { folder, ..PolicyConfig::default() };
        Policies::load(&config, &self.profiles, &self.storage)
    }

    /// Checks the active version, its origin, and the last problem.
    fn check(&self, policies: &Policies, component: &[u8], origin: Origin, problem: &str) {
        let report = policies.report();
        let mine = &report.policies[0];
        let message = mine.problem.as_ref().map_or("", |problem| &problem.message);
        assert_eq!(mine.sha256, sha256(component), "{message}");
        assert_eq!(mine.origin, origin, "{message}");
        assert!(message.contains(problem) && message.is_empty() == problem.is_empty(), "{message}");
        assert_eq!(mine.file, Some(self.file()));
        start(policies, "default").unwrap().ask(&RequestView::default()).unwrap();
    }
}

#[test]
fn an_unknown_profile_is_refused() {
    let policies = load(&[("default", "passthrough")]).unwrap();
    let error = start(&policies, "agent").err().unwrap().to_string();
    assert_eq!(error, "profile: `agent` does not exist, only default");
}

#[test]
fn load_errors_name_policy_profile_and_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("text.wasm"), version(b'b')).unwrap();
    fs::create_dir(path("deep")).unwrap();
    fs::write(path("deep/text.wasm"), version(b'a')).unwrap();
    let config = PolicyConfig { folder: folder.path().into(), ..PolicyConfig::default() };
    let (text, deep, nowhere) = (path("text.wasm"), path("deep/text.wasm"), path("no.wasm"));
    for (entries, words) in [
        (&[nowhere.as_str()][..], &["policy `no`", "does not exist", "`default`"][..]),
        (&["absent"], &["policy `absent`", "absent.wasm"]),
        (&["not/../a name"], &["policy `a name`", "does not exist"]),
        (&["a name"], &["policy `a name`", "is not the name"]),
        (&["text", &deep], &["policy `text`", "is the name of both", &text, &deep]),
    ] {
        let mut profiles = profiles(&[("agent", "passthrough")]);
        let agent = profiles.get_mut("agent").unwrap();
        agent.policies = entries.iter().map(|entry| (*entry).to_owned()).collect();
        let error = load_with(&config, &profiles).err().expect(entries[0]).to_string();
        for word in words {
            assert!(error.contains(word), "`{word}` is not in {error}");
        }
        assert!(error.ends_with("(profile `agent`)"), "{error}");
    }
    let config = PolicyConfig { folder: path("none").into(), ..config };
    let error = load_with(&config, &profiles(&[("default", "passthrough")])).err().unwrap();
    assert!(error.to_string().ends_with("is not a folder; create it"), "{error}");
}

#[test]
fn a_policy_in_the_folder_takes_precedence_and_one_file_may_be_named_twice() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("passthrough.wasm");
    let mut profiles = profiles(&[("default", "passthrough"), ("other", "default")]);
    profiles.get_mut("other").unwrap().shadow.push(file.display().to_string());
    let config = PolicyConfig { folder: folder.path().into(), ..PolicyConfig::default() };
    let origins = |policies: &Policies| {
        policies.report().policies.iter().map(|policy| policy.origin).collect::<Vec<_>>()
    };
    let error = load_with(&config, &profiles).err().map(|error| error.to_string());
    assert_eq!(error, None, "the same file, by name and by path");
    fs::write(&file, version(b'a')).unwrap();
    let policies = load_with(&config, &profiles).unwrap();
    assert_eq!(origins(&policies), [Origin::Shipped, Origin::File]);
    let uses = policies.report().policies.remove(1).profiles;
    let uses: Vec<_> = uses.iter().map(|u| (u.profile.as_str(), u.position, u.shadow)).collect();
    assert_eq!(uses, [("default", 0, false), ("other", 1, true)]);
}

#[test]
fn the_digest_changes_with_everything_that_affects_decisions_only() {
    let digest = |config: &PolicyConfig, change: &dyn Fn(&mut ProfilePolicies)| {
        let mut profiles = profiles(&[("default", "passthrough")]);
        change(profiles.get_mut("default").unwrap());
        start(&load_with(config, &profiles).unwrap(), "default").unwrap().digest
    };
    let config = PolicyConfig::default();
    let base = digest(&config, &|_| ());
    let same: [&dyn Fn(&mut ProfilePolicies); 2] =
        [&|profile| profile.shadow = vec!["default".into()], &|profile| profile.trace_text = true];
    for change in same {
        assert_eq!(digest(&config, change), base);
    }
    let (both, turned) = (["default", "passthrough"], ["passthrough", "default"]);
    let other: [&dyn Fn(&mut ProfilePolicies); 6] = [
        &|profile| profile.policies = vec!["default".into()],
        &|profile| profile.policies = both.map(String::from).into(),
        &|profile| profile.policies = turned.map(String::from).into(),
        &|profile| drop(profile.params.insert("thinking".into(), "off".into())),
        &|profile| profile.on_failure = OnFailure::Closed,
        &|profile| profile.grants = vec![Grant::Kv],
    ];
    let mut digests = vec![base];
    digests.extend(other.map(|change| digest(&config, change)));
    digests.push(digest(&PolicyConfig { fuel: 1_000_000, ..config.clone() }, &|_| ()));
    digests.push(digest(&PolicyConfig { kv_bytes: 0, ..config }, &|_| ()));
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), 9);
}

/// The shipped version was written to the folder, where the one of a later release could not replace it.
#[test]
fn a_rollback_to_the_shipped_version_removes_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("passthrough.wasm");
    let config = PolicyConfig { folder: folder.path().into(), ..PolicyConfig::default() };
    let profiles = profiles(&[("default", "passthrough")]);
    let policies = load_with(&config, &profiles).unwrap();
    policies.upload("passthrough", &version(b'a')).unwrap();
    assert!(file.exists());
    let done = policies.roll_back("passthrough").unwrap();
    assert_eq!(done.sha256, sha256(crate::shipped("passthrough").unwrap().0));
    assert!(done.notes[0].starts_with("removed ") && !file.exists(), "{:?}", done.notes);
    policies.reload();
    let report = policies.report().policies.remove(0);
    assert_eq!((report.origin, report.problem), (Origin::Shipped, None));
}

#[test]
fn rollbacks_return_version_by_version_and_update_the_file() {
    let site = Site::new();
    let policies = site.load().unwrap();
    let error = policies.roll_back("mine").unwrap_err().to_string();
    assert_eq!(error, "policy `mine`: there is no earlier version");
    for name in [b'b', b'c'] {
        policies.upload("mine", &version(name)).unwrap();
    }
    for name in [b'b', b'a'] {
        let done = policies.roll_back("mine").unwrap();
        assert_eq!(done.sha256, sha256(&version(name)));
        site.check(&policies, &version(name), Origin::History, "");
        assert_eq!(fs::read(site.file()).unwrap(), version(name));
        policies.reload();
        site.check(&policies, &version(name), Origin::History, "");
    }
    policies.roll_back("mine").unwrap_err();
    site.check(&site.load().unwrap(), &version(b'a'), Origin::File, "");
    // A version that was rolled back is skipped unless it was uploaded again.
    policies.upload("mine", &version(b'd')).unwrap();
    assert_eq!(policies.roll_back("mine").unwrap().sha256, sha256(&version(b'a')));
    fs::write(site.file(), version(b'c')).unwrap();
    policies.reload();
    site.check(&policies, &version(b'c'), Origin::File, "");
}

fn fail(policies: &Policies) {
    let cause = Cause::Trap("unreachable".into());
    let failure = Failure { policy: "mine".into(), hook: "on-step", cause };
    let breaker = policies.current("mine").unwrap().breakers.of("default", false);
    (0..3).for_each(|_| breaker.failed(&failure));
}

#[test]
fn two_failing_versions_are_rolled_back_in_turn_and_the_first_version_never() {
    let site = Site::new();
    let policies = site.load().unwrap();
    for name in [b'b', b'c'] {
        install(&policies, name);
    }
    for name in [b'b', b'a', b'a'] {
        fail(&policies);
        site.check(&policies, &version(name), Origin::File, "failed in 3 of its first");
    }
}

fn profile_with(policies: &[&str], params: &[(&str, Param)]) -> BTreeMap<String, ProfilePolicies> {
    let params = params.iter().map(|(name, param)| ((*name).into(), param.clone())).collect();
    let policies = policies.iter().map(|policy| (*policy).into()).collect();
    let profile = ProfilePolicies { policies, params, ..ProfilePolicies::default() };
    BTreeMap::from([("agent".into(), profile)])
}

#[test]
fn an_unreadable_parameter_file_is_refused_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.toml");
    let profiles = profile_with(&["passthrough"], &[("rules", Param::File { file: file.clone() })]);
    let load = || load_with(&PolicyConfig::default(), &profiles);
    let refused = |words: &str| {
        let error = load().err().expect(words).to_string();
        for word in [words, "profiles.agent.params.rules: ", file.to_str().unwrap()] {
            assert!(error.contains(word), "`{word}` is not in {error}");
        }
    };
    refused("does not exist");
    fs::write(&file, vec![b' '; PARAM_BYTES + 1]).unwrap();
    refused("262144 bytes");
    fs::write(&file, [0xff]).unwrap();
    refused("utf-8");
    fs::write(&file, "one").unwrap();
    load().unwrap();
}

/// They were ignored, and only the notes of replies reported it.
#[test]
fn a_parameter_that_no_policy_of_the_profile_knows_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let blind = folder.path().join("blind.wasm");
    fs::write(&blind, stepper("i32.const 0", "")).unwrap();
    let blind = blind.to_str().unwrap();
    let of_one = |policy: &str| format!("the policy `{policy}` has no such parameter");
    let of_none = |names: &str| format!("none of the policies {names} has such a parameter");
    let near = |problem: String, name: &str| Some(format!("{problem}; did you mean `{name}`?"));
    let cases: [(&[&str], &str, Option<String>); 14] = [
        (&["default"], "reasoning_budget", None),
        (&["default"], "budget", Some(of_one("default"))),
        (&["default"], "reasoning_budgt", near(of_one("default"), "reasoning_budget")),
        (&["default"], "default.reasoning_budget", None),
        (&["default"], "default.budget", Some(of_one("default"))),
        (&["default"], "default.reasoningbudget", near(of_one("default"), "reasoning_budget")),
        (
            &["default"],
            "agent.escapes",
            Some("the profile does not name that policy, only default".into()),
        ),
        (&["default", "agent"], "escapes", None),
        (&["default", "agent"], "agent.escapes", None),
        (
            &["default", "agent"],
            "agnt.escapes",
            Some(
                "the profile does not name that policy, only default, agent; did you mean `agent`?"
                    .into(),
            ),
        ),
        // `escapes` is a parameter of the other one.
        (&["default", "agent"], "default.escapes", Some(of_one("default"))),
        (&["rules", "default"], "rule", near(of_none("rules, default"), "rules")),
        // It notes nothing.
        (&["default", "passthrough"], "budget", None),
        // It has no hook that receives parameters.
        (&[blind], "budget", Some(of_one("blind"))),
    ];
    for (policies, param, problem) in cases {
        let profiles = profile_with(policies, &[(param, "7".into())]);
        let error = load_with(&PolicyConfig::default(), &profiles).err();
        let error = error.map(|error| error.to_string());
        let expected = problem.map(|problem| format!("profiles.agent.params.{param}: {problem}"));
        assert_eq!(error, expected, "{policies:?} {param}");
    }
}

/// `redact`, `tool-guard`, `budget` and others call a parameter that they do not know a problem in `on-params`. A profile
/// with `rules` before them had a problem at its start, and no change of its rules was accepted.
#[test]
fn a_parameter_of_another_policy_is_no_problem() {
    let others: Vec<_> = SHIPPED.iter().map(|shipped| shipped.name).collect();
    let others: Vec<_> = others.into_iter().filter(|name| *name != "rules").collect();
    for some in others.chunks(4) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rules.toml");
        fs::write(&file, "[[rule]]\ndo = { note = \"one\" }\n").unwrap();
        let chain = [&["rules"][..], some].concat();
        let mut profiles = profile_with(&chain, &[("rules", Param::File { file })]);
        profiles.get_mut("agent").unwrap().grants = Grant::ALL.into();
        let policies = load_with(&PolicyConfig::default(), &profiles).unwrap();
        let problems = policies.report().params.into_iter().filter_map(|param| param.problem);
        let problems: Vec<_> = problems.map(|problem| problem.message).collect();
        assert!(!problems.iter().any(|line| line.contains("unknown")), "{chain:?}: {problems:?}");
        let mut session = start(&policies, "agent").unwrap();
        let params = (*session.params).clone();
        let request = RequestView { profile: "agent".into(), params, ..RequestView::default() };
        let note = session.ask(&request).unwrap().note.unwrap_or_default();
        assert!(note.contains("one") && !note.contains("unknown"), "{chain:?}: {note}");
    }
}

#[test]
fn all_unknown_parameters_of_a_profile_are_named() {
    let params = [("budget", "7".into()), ("reasoning", "on".into()), ("hints", "x".into())];
    let error = load_with(&PolicyConfig::default(), &profile_with(&["default"], &params)).err();
    let Some(Error::Params { profile, problems }) = error else { panic!("{error:?}") };
    let names: Vec<_> = problems.iter().map(|(param, _)| param.as_str()).collect();
    assert_eq!((profile.as_str(), names), ("agent", vec!["budget", "hints"]));
}

/// The error about a misspelt name was a list of all policies.
#[test]
fn the_policy_that_was_meant_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("house-style.wasm"), stepper("i32.const 0", "")).unwrap();
    let config = PolicyConfig { folder: folder.path().into(), ..PolicyConfig::default() };
    for (name, near) in [("defualt", "default"), ("house_style", "house-style")] {
        let error = load_with(&config, &profile_with(&[name], &[])).err().unwrap().to_string();
        assert!(error.contains(&format!("did you mean `{near}`?")), "{error}");
    }
    let error = load_with(&config, &profile_with(&["mine"], &[])).err().unwrap().to_string();
    assert!(error.contains("`passthrough`") && !error.contains("did you mean"), "{error}");
}

/// The file of the policy may be broken for a moment, and its parameters must not stop the start then.
#[test]
fn an_unknown_parameter_is_accepted_while_an_earlier_version_runs() {
    let mut site = Site::new();
    fs::write(site.file(), stepper("i32.const 0", "")).unwrap();
    drop(site.load().unwrap());
    let mine = site.profiles.get_mut("default").unwrap();
    mine.params.insert("budget".into(), "7".into());
    assert!(site.load().is_err());
    fs::write(site.file(), "broken").unwrap();
    assert_eq!(site.load().unwrap().report().policies[0].origin, Origin::History);
}
