use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use super::super::breaker::PROBATION_FAILURES;
use super::super::{
    Plan, RequestView,
    disk::{self, Disk},
    no_vocabulary,
};
use super::place::{PARAM_BYTES, SHIPPED};
use super::*;
use crate::config::Grant;

fn profiles(list: &[(&str, &str)]) -> BTreeMap<String, Profile> {
    let profile = |policy: &str| Profile { policies: vec![policy.into()], ..Profile::default() };
    list.iter().map(|(name, policy)| ((*name).into(), profile(policy))).collect()
}

fn load(list: &[(&str, &str)]) -> Result<Policies> {
    load_with(&PolicyConfig::default(), &profiles(list))
}

fn load_with(config: &PolicyConfig, profiles: &BTreeMap<String, Profile>) -> Result<Policies> {
    Policies::load(config, profiles, &disk::in_memory())
}

fn start(policies: &Policies, profile: &str) -> Result<Steering> {
    policies.start(profile, "request", &no_vocabulary())
}

/// A policy that does nothing, in a version of its own: what it is called does not matter to it.
fn version(name: u8) -> Vec<u8> {
    let passthrough = SHIPPED.iter().find(|shipped| shipped.name == "passthrough").unwrap();
    // A custom section: its number, its size, and a name of one byte.
    [passthrough.component, &[0, 2, 1, name]].concat()
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// A folder of policies, what is kept of them, and a profile that names `mine`.
struct Site {
    folder: tempfile::TempDir,
    disk: Disk,
    profiles: BTreeMap<String, Profile>,
}

impl Site {
    fn new() -> Self {
        let site = Self {
            folder: tempfile::tempdir().unwrap(),
            disk: disk::in_memory(),
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
        Policies::load(&config, &self.profiles, &self.disk)
    }

    /// Checks which version runs, how it came, and words of the last problem.
    fn runs(&self, policies: &Policies, component: &[u8], origin: Origin, problem: &str) {
        let report = policies.report();
        let mine = &report.policies[0];
        let what = mine.problem.as_ref().map_or("", |problem| &problem.what);
        assert_eq!(mine.sha256, sha256(component), "{what}");
        assert_eq!(mine.origin, origin, "{what}");
        assert!(what.contains(problem) && what.is_empty() == problem.is_empty(), "{what}");
        assert_eq!(mine.file, Some(self.file()));
        start(policies, "default").unwrap().policy.on_request(&RequestView::default()).unwrap();
    }
}

#[test]
fn the_shipped_policies_load_and_plan() {
    let policies = load(&[("default", "default"), ("off", "passthrough")]).unwrap();
    let view = RequestView { can_think: true, context_left: 4096, ..RequestView::default() };
    let plan = start(&policies, "default").unwrap().policy.on_request(&view).unwrap();
    assert_eq!(plan.thinking, Some(true));
    assert!(plan.loops.is_some());
    let plan = start(&policies, "off").unwrap().policy.on_request(&view).unwrap();
    assert_eq!(plan, Plan::default());
}

#[test]
fn an_unknown_profile_is_refused_by_its_field() {
    let policies = load(&[("default", "passthrough")]).unwrap();
    let error = start(&policies, "agent").err().unwrap().to_string();
    assert_eq!(error, "profile: there is no profile `agent`, only default");
}

#[test]
fn what_cannot_be_loaded_is_refused_by_its_name_profile_and_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    fs::write(path("text.wasm"), "no component").unwrap();
    fs::create_dir(path("deep")).unwrap();
    fs::write(path("deep/text.wasm"), version(b'a')).unwrap();
    let config = PolicyConfig { folder: folder.path().into(), ..PolicyConfig::default() };
    let (text, deep, nowhere) = (path("text.wasm"), path("deep/text.wasm"), path("no.wasm"));
    for (entries, words) in [
        (&[nowhere.as_str()][..], &["policy `no`", "there is no file", "`default`"][..]),
        (&["absent"], &["policy `absent`", "absent.wasm"]),
        (&["not/../a name"], &["policy `a name`", "there is no file"]),
        (&["a name"], &["policy `a name`", "is no name"]),
        (&["text"], &["policy `text`", "is not a valid component"]),
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
    assert!(error.to_string().starts_with("policy.folder: there is no folder"), "{error}");
}

#[test]
fn a_policy_in_the_folder_goes_before_one_that_ships_and_one_file_may_be_named_twice() {
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
fn the_digest_changes_with_all_that_decides_and_with_nothing_else() {
    let digest = |config: &PolicyConfig, change: &dyn Fn(&mut Profile)| {
        let mut profiles = profiles(&[("default", "passthrough")]);
        change(profiles.get_mut("default").unwrap());
        start(&load_with(config, &profiles).unwrap(), "default").unwrap().digest
    };
    let config = PolicyConfig::default();
    let base = digest(&config, &|_| ());
    let same: [&dyn Fn(&mut Profile); 3] = [
        &|profile| profile.shadow = vec!["default".into()],
        &|profile| profile.trace_text = true,
        &|profile| profile.limits.requests = 1,
    ];
    for change in same {
        assert_eq!(digest(&config, change), base);
    }
    let (both, turned) = (["default", "passthrough"], ["passthrough", "default"]);
    let other: [&dyn Fn(&mut Profile); 6] = [
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

#[test]
fn a_version_that_is_whole_replaces_the_one_before_it_for_all_profiles_at_once() {
    let mut site = Site::new();
    site.profiles.extend(profiles(&[("other", "mine"), ("third", "passthrough")]));
    let policies = site.load().unwrap();
    let digests = || ["default", "other", "third"].map(|p| start(&policies, p).unwrap().digest);
    let before = digests();
    let running = start(&policies, "default").unwrap();
    let done = policies.install("mine", &version(b'b'), Origin::File).unwrap();
    assert_eq!(done.sha256, sha256(&version(b'b')));
    assert_eq!(done.replaced, Some(sha256(&version(b'a'))));
    site.runs(&policies, &version(b'b'), Origin::File, "");
    let after = digests();
    assert!(before[0] != after[0] && before[1] != after[1] && before[2] == after[2]);
    assert_eq!(running.digest, before[0]);

    let again = policies.install("mine", &version(b'b'), Origin::File).unwrap();
    assert_eq!(again.replaced, None);
    let kept = policies.versions("mine").unwrap();
    let kept: Vec<_> = kept.iter().map(|kept| kept.sha256.clone()).collect();
    assert_eq!(kept, [version(b'b'), version(b'a')].map(|bytes| sha256(&bytes)));
}

#[test]
fn what_is_refused_changes_nothing_and_is_reported_until_something_is_not() {
    let site = Site::new();
    let policies = site.load().unwrap();
    let digest = start(&policies, "default").unwrap().digest;
    let error = policies.install("mine", b"text", Origin::Upload).unwrap_err().to_string();
    assert!(error.starts_with("policy `mine`: is not a valid component"), "{error}");
    site.runs(&policies, &version(b'a'), Origin::File, &error);
    assert_eq!(start(&policies, "default").unwrap().digest, digest);
    assert_eq!(fs::read(site.file()).unwrap(), version(b'a'));
    let error = policies.install("other", &version(b'b'), Origin::Upload).unwrap_err();
    assert!(error.to_string().contains("no profile names it, only mine"), "{error}");
    policies.install("mine", &version(b'b'), Origin::File).unwrap();
    site.runs(&policies, &version(b'b'), Origin::File, "");
}

#[test]
fn an_upload_is_in_its_file_and_so_outlives_a_restart() {
    let site = Site::new();
    let policies = site.load().unwrap();
    policies.install("mine", &version(b'b'), Origin::Upload).unwrap();
    site.runs(&policies, &version(b'b'), Origin::Upload, "");
    assert_eq!(fs::read(site.file()).unwrap(), version(b'b'));
    policies.refresh();
    site.runs(&policies, &version(b'b'), Origin::Upload, "");
    site.runs(&site.load().unwrap(), &version(b'b'), Origin::File, "");

    let policies = load(&[("default", "passthrough")]).unwrap();
    let error = policies.install("passthrough", &version(b'b'), Origin::Upload).unwrap_err();
    assert!(error.to_string().starts_with("policy.folder: is not set"), "{error}");
    assert_eq!(policies.report().policies[0].origin, Origin::Shipped);
}

#[test]
fn a_rollback_goes_back_version_by_version_in_the_file_too() {
    let site = Site::new();
    let policies = site.load().unwrap();
    let error = policies.rollback("mine").unwrap_err().to_string();
    assert_eq!(error, "policy `mine`: there is no earlier version to go back to");
    for name in [b'b', b'c'] {
        policies.install("mine", &version(name), Origin::Upload).unwrap();
    }
    for name in [b'b', b'a'] {
        let done = policies.rollback("mine").unwrap();
        assert_eq!(done.sha256, sha256(&version(name)));
        site.runs(&policies, &version(name), Origin::Kept, "");
        assert_eq!(fs::read(site.file()).unwrap(), version(name));
        policies.refresh();
        site.runs(&policies, &version(name), Origin::Kept, "");
    }
    policies.rollback("mine").unwrap_err();
    site.runs(&site.load().unwrap(), &version(b'a'), Origin::File, "");
    // What was gone back from is not gone back to, unless it was brought again.
    policies.install("mine", &version(b'd'), Origin::Upload).unwrap();
    assert_eq!(policies.rollback("mine").unwrap().sha256, sha256(&version(b'a')));
    fs::write(site.file(), version(b'c')).unwrap();
    policies.refresh();
    site.runs(&policies, &version(b'c'), Origin::File, "");
}

#[test]
fn what_ships_can_be_gone_back_to_where_there_is_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let config = PolicyConfig { folder: folder.path().into(), ..PolicyConfig::default() };
    let policies = load_with(&config, &profiles(&[("default", "passthrough")])).unwrap();
    policies.install("passthrough", &version(b'b'), Origin::Upload).unwrap();
    policies.rollback("passthrough").unwrap();
    let shipped = SHIPPED.iter().find(|shipped| shipped.name == "passthrough").unwrap();
    assert_eq!(policies.report().policies[0].sha256, sha256(shipped.component));
    assert_eq!(fs::read(folder.path().join("passthrough.wasm")).unwrap(), shipped.component);
}

fn fail(policies: &Policies) {
    (0..PROBATION_FAILURES)
        .for_each(|_| policies.running("mine").breaker.failed("on-step: trapped"));
}

#[test]
fn a_fresh_version_that_fails_is_taken_back_and_not_tried_again_until_its_file_changes() {
    let site = Site::new();
    let policies = site.load().unwrap();
    fs::write(site.file(), version(b'b')).unwrap();
    policies.refresh();
    site.runs(&policies, &version(b'b'), Origin::File, "");
    let old = start(&policies, "default").unwrap();
    fail(&policies);
    let why = "failed in 3 of its first 4 requests: on-step: trapped";
    site.runs(&policies, &version(b'a'), Origin::File, why);
    assert_ne!(start(&policies, "default").unwrap().digest, old.digest);
    policies.refresh();
    site.runs(&policies, &version(b'a'), Origin::File, why);

    // Nor after a restart, once that is known on disk.
    let started = Instant::now();
    while policies.failed_before("mine", &Sha256::digest(version(b'b')).into()).is_none() {
        assert!(started.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
    let policies = site.load().unwrap();
    site.runs(&policies, &version(b'a'), Origin::Kept, why);
    policies.refresh();
    site.runs(&policies, &version(b'a'), Origin::Kept, why);
    for name in [b'c', b'b'] {
        fs::write(site.file(), version(name)).unwrap();
        policies.refresh();
        site.runs(&policies, &version(name), Origin::File, "");
    }
}

#[test]
fn two_fresh_versions_that_fail_are_taken_back_one_after_the_other_and_the_first_never() {
    let site = Site::new();
    let policies = site.load().unwrap();
    for name in [b'b', b'c'] {
        policies.install("mine", &version(name), Origin::File).unwrap();
    }
    for name in [b'b', b'a', b'a'] {
        fail(&policies);
        site.runs(&policies, &version(name), Origin::File, "failed in 3 of its first");
    }
}

#[test]
fn a_start_with_a_broken_file_runs_the_last_good_version_and_says_so() {
    let site = Site::new();
    drop(site.load().unwrap());
    fs::write(site.file(), version(b'b')).unwrap();
    drop(site.load().unwrap());
    fs::write(site.file(), &version(b'c')[..1000]).unwrap();
    let policies = site.load().unwrap();
    site.runs(&policies, &version(b'b'), Origin::Kept, "is not a valid component");
    fs::write(site.file(), version(b'c')).unwrap();
    policies.refresh();
    site.runs(&policies, &version(b'c'), Origin::File, "");
    // What is not there was taken away on purpose.
    fs::remove_file(site.file()).unwrap();
    assert!(site.load().err().unwrap().to_string().contains("there is no file"));
}

#[test]
fn a_file_that_is_half_written_or_gone_leaves_what_runs_until_it_is_whole() {
    let site = Site::new();
    let policies = site.load().unwrap();
    let whole = version(b'b');
    fs::write(site.file(), &whole[..whole.len() / 2]).unwrap();
    policies.refresh();
    site.runs(&policies, &version(b'a'), Origin::File, "is not a valid component");
    fs::remove_file(site.file()).unwrap();
    policies.refresh();
    site.runs(&policies, &version(b'a'), Origin::File, "there is no file");
    fs::write(site.file(), version(b'a')).unwrap();
    policies.refresh();
    site.runs(&policies, &version(b'a'), Origin::File, "");
    fs::write(site.file(), &whole).unwrap();
    policies.refresh();
    site.runs(&policies, &whole, Origin::File, "");
}

#[test]
fn parameters_in_files_are_read_at_the_start_and_when_they_change() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rules.toml");
    let mut profiles = profiles(&[("default", "passthrough"), ("other", "passthrough")]);
    let param = Param::File { file: file.clone() };
    profiles.get_mut("default").unwrap().params.insert("rules".into(), param);
    let load = || load_with(&PolicyConfig::default(), &profiles);
    let refused = |words: &str| {
        let error = load().err().expect(words).to_string();
        for word in [words, "`default`", "`rules`", file.to_str().unwrap()] {
            assert!(error.contains(word), "`{word}` is not in {error}");
        }
    };
    refused("there is no file");
    fs::write(&file, vec![b' '; PARAM_BYTES + 1]).unwrap();
    refused("262144 bytes");
    fs::write(&file, [0xff]).unwrap();
    refused("utf-8");

    fs::write(&file, "one").unwrap();
    let policies = load().unwrap();
    let read = |text: &str, problem: bool| {
        policies.refresh();
        let steering = start(&policies, "default").unwrap();
        assert_eq!(steering.params["rules"], text);
        let report = policies.report().params.remove(0);
        assert_eq!((&*report.profile, &*report.param, &report.file), ("default", "rules", &file));
        assert_eq!(report.problem.is_some(), problem);
        steering.digest
    };
    let one = read("one", false);
    fs::write(&file, "two").unwrap();
    assert_ne!(read("two", false), one);
    fs::remove_file(&file).unwrap();
    read("two", true);
    fs::write(&file, "one").unwrap();
    assert_eq!(read("one", false), one);
}

#[test]
fn a_watched_file_is_loaded_when_it_changes_and_the_watch_ends_with_the_policies() {
    let site = Site::new();
    let policies = Arc::new(site.load().unwrap());
    policies.watch();
    let beside = Path::new(&site.file()).with_extension("new");
    fs::write(&beside, version(b'b')).unwrap();
    fs::rename(&beside, site.file()).unwrap();
    let started = Instant::now();
    while policies.report().policies[0].sha256 != sha256(&version(b'b')) {
        assert!(started.elapsed() < Duration::from_secs(20), "the change is not noticed");
        std::thread::sleep(Duration::from_millis(10));
    }
    let weak = Arc::downgrade(&policies);
    drop(policies);
    let started = Instant::now();
    while weak.upgrade().is_some() {
        assert!(started.elapsed() < Duration::from_secs(20), "the watch keeps them");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn parameters_of_a_policy_that_the_profile_lacks_are_refused_by_name() {
    let mut profiles = profiles(&[("default", "default")]);
    let params = &mut profiles.get_mut("default").unwrap().params;
    params.insert("default.think_budget".into(), "7".into());
    params.insert("agent.think_budget".into(), "9".into());
    let error = load_with(&PolicyConfig::default(), &profiles).err().expect("a wrong name");
    let words =
        "params `agent.think_budget` of profile `default`: it has no such policy, only default";
    assert!(error.to_string().contains(words), "{error}");
}
