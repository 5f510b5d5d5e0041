//! Bundles: what is opened, whose, and what happens to requests meanwhile.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use minisign::KeyPair;
use steersman_policy_host::{
    BUNDLE_BYTES, Bundle, Error, Grant, Param, Policies, PolicyConfig, ProfilePolicies,
    RequestView, Signer, Storage, Trust, no_vocabulary, pack, shipped,
};
use steersman_test_support::guest::replace;
use tar::{Builder, EntryType, Header};

const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes of a README.
const README_BYTES: usize = 1 << 20;

const SCHEMA: &str = "[word]\ntype = \"text\"\n";

fn parts() -> [&'static [u8]; 4] {
    [b"\0asm component", b"{\"hook\":\"on-finish\"}\n", SCHEMA.as_bytes(), b"# mine\n"]
}

fn sign(pair: &KeyPair, archive: &[u8]) -> Vec<u8> {
    let signature = minisign::sign(None, &pair.sk, archive, None, None).unwrap();
    let text = signature.into_string();
    [text.trim_end().as_bytes(), b"\n", archive].concat()
}

fn key() -> KeyPair {
    KeyPair::generate_unencrypted_keypair().unwrap()
}

fn trusting(pairs: &[&KeyPair], allow_unsigned: bool) -> Trust {
    let trusted_keys: Vec<_> = pairs.iter().map(|pair| pair.pk.to_base64()).collect();
    Trust::new(&trusted_keys, allow_unsigned).unwrap()
}

fn refusal(file: Vec<u8>, trust: &Trust) -> String {
    Bundle::open("mine", file, trust).map(|bundle| bundle.signer).unwrap_err()
}

#[test]
fn a_signed_bundle_has_its_parts_and_its_signer() {
    let (pair, other) = (key(), key());
    let archive = pack("mine", parts());
    let signed = sign(&pair, &archive);
    let bundle = Bundle::open("mine", signed.clone(), &trusting(&[&other, &pair], false)).unwrap();
    assert_eq!(bundle.signer, Signer::Key(pair.pk.to_base64()));
    assert_eq!([&bundle.component[..], bundle.golden.as_bytes()], [parts()[0], parts()[1]]);
    assert_eq!(bundle.schema.unwrap().text, SCHEMA);
    assert_eq!((bundle.readme.as_str(), bundle.is_archive), ("# mine\n", true));
    assert!(bundle.file == signed);
    // Without keys nobody can say who signed it.
    let unknown = Bundle::open("mine", signed, &Trust::default()).unwrap();
    assert_eq!(unknown.signer, Signer::Unknown);
    let unsigned = Bundle::open("mine", archive, &Trust::default()).unwrap();
    assert_eq!((unsigned.signer, unsigned.is_archive), (Signer::Nobody, true));
}

/// One byte of each part, of each header and of the signature.
#[test]
fn a_flipped_byte_is_found_wherever_it_is() {
    let pair = key();
    let archive = pack("mine", parts());
    let signed = sign(&pair, &archive);
    let trust = trusting(&[&pair], true);
    let start = signed.len() - archive.len();
    for part in parts() {
        let at = archive.windows(part.len()).position(|window| window == part).unwrap();
        let mut flipped = signed.clone();
        flipped[start + at] ^= 1;
        let problem = refusal(flipped, &trust);
        assert!(problem.starts_with("bundle: its signature does not fit its content"), "{problem}");
    }
    for at in 0..signed.len() {
        // Base64 ignores no bits, and neither the comment of the key nor that of the signer is free text here.
        let is_untrusted_comment = at < signed.iter().position(|byte| *byte == b'\n').unwrap();
        if is_untrusted_comment {
            continue;
        }
        let mut flipped = signed.clone();
        flipped[at] ^= 1;
        assert!(Bundle::open("mine", flipped, &trust).is_err(), "byte {at}");
    }
    // Without a signature, a change of a header or of the end is found; one of a part is not.
    let headers = |at: &usize| at % 1024 < 512 || *at >= 4096;
    for at in (0..archive.len()).filter(headers) {
        let mut flipped = archive.clone();
        flipped[at] ^= 1;
        // What is no archive any more is a component, which no compiler accepts.
        let opened = Bundle::open("mine", flipped, &Trust::default());
        assert!(opened.is_err() || !opened.unwrap().is_archive, "byte {at}");
    }
}

#[test]
fn who_did_not_sign_is_refused_where_keys_are_configured() {
    let (pair, stranger) = (key(), key());
    let archive = pack("mine", parts());
    let unsigned = "is not signed, and policy.trusted_keys names who may sign; sign it";
    for (file, what) in
        [(archive.clone(), "bundle: the bundle"), (parts()[0].to_vec(), "the component")]
    {
        let problem = refusal(file.clone(), &trusting(&[&pair], false));
        assert!(problem.starts_with(&format!("{what} {unsigned}")), "{problem}");
        assert!(problem.ends_with("or set policy.allow_unsigned = true"), "{problem}");
        let bundle = Bundle::open("mine", file, &trusting(&[&pair], true)).unwrap();
        assert_eq!(bundle.signer, Signer::Nobody);
    }
    // A wrong signature is none that `allow_unsigned` accepts.
    for allow_unsigned in [false, true] {
        let problem = refusal(sign(&stranger, &archive), &trusting(&[&pair], allow_unsigned));
        assert_eq!(problem, "bundle: it is signed, but by no key of policy.trusted_keys");
    }
}

#[test]
fn a_key_that_is_none_and_a_setting_without_effect_are_refused() {
    let config = |keys: &[&str], allow_unsigned| PolicyConfig {
        trusted_keys: keys.iter().map(|key| (*key).to_owned()).collect(),
        allow_unsigned,
        ..PolicyConfig::default()
    };
    let problem = config(&["RWQ"], false).check().unwrap_err().to_string();
    assert!(problem.starts_with("policy.trusted_keys: `RWQ` is not a public key"), "{problem}");
    let problem = config(&[], true).check().unwrap_err().to_string();
    assert!(problem.starts_with("policy.allow_unsigned: has no effect"), "{problem}");
}

/// An archive with these entries: names, contents and types.
fn archive(entries: &[(&str, &[u8], EntryType)]) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    for (name, bytes, kind) in entries {
        let mut header = Header::new_ustar();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        header.set_entry_type(*kind);
        header.set_cksum();
        archive.append(&header, *bytes).unwrap();
    }
    archive.into_inner().unwrap()
}

#[test]
fn a_bundle_has_just_its_four_files() {
    let file = EntryType::Regular;
    let [component, golden, schema, readme] = parts();
    let names = ["mine.wasm", "mine.jsonl", "mine.params.toml", "README.md"];
    let all: Vec<_> = names.into_iter().zip(parts()).map(|(n, bytes)| (n, bytes, file)).collect();
    assert!(archive(&all) == pack("mine", parts()), "the archives differ in what is tested only");
    for (missing, name) in names.iter().enumerate() {
        let mut some = all.clone();
        some.remove(missing);
        let problem = refusal(archive(&some), &Trust::default());
        assert_eq!(problem, format!("bundle: `{name}` is missing"));
    }
    let link = EntryType::Symlink;
    let long = vec![b'#'; README_BYTES + 1];
    let cases: &[(&[_], &str)] = &[
        (&[("../mine.wasm", component, file)], "contains `../mine.wasm`; that of policy `mine`"),
        (&[("/etc/mine.wasm", component, file)], "contains `/etc/mine.wasm`"),
        (
            &[("other.wasm", component, file)],
            "contains `other.wasm`; that of policy `mine` has just",
        ),
        (&[("mine.wasm", b"", link)], "`mine.wasm` is not a regular file"),
        (&[("mine.wasm", b"", EntryType::Directory)], "`mine.wasm` is not a regular file"),
        (&[("././@LongLink", b"x", EntryType::GNULongName)], "contains `././@LongLink`"),
        (
            &[("mine.wasm", component, file), ("mine.wasm", component, file)],
            "`mine.wasm` is in it twice",
        ),
        (&[("README.md", &long, file)], "`README.md` has 1048577 bytes, more than 1048576"),
        (&[("mine.jsonl", golden, file), all[0], all[2], all[3]], "is not the archive that"),
        (&[all[0], all[1], ("mine.params.toml", b"[a]", file), all[3]], "mine.params.toml: "),
        (&[all[0], ("mine.jsonl", b"\xff", file), all[2], all[3]], "mine.jsonl: invalid utf-8"),
    ];
    for (entries, words) in cases {
        let problem = refusal(archive(entries), &Trust::default());
        assert!(problem.starts_with("bundle: ") && problem.contains(words), "{words}: {problem}");
    }
    let more = [pack("mine", parts()), vec![0; 512]].concat();
    assert!(refusal(more, &Trust::default()).contains("is not the archive that"));
    let cut = pack("mine", [component, golden, schema, readme]);
    assert!(refusal(cut[..600].to_vec(), &Trust::default()).starts_with("bundle: "));
    assert!(refusal(vec![0; BUNDLE_BYTES + 1], &Trust::default()).contains("more than"));
}

#[test]
fn a_damaged_signature_is_named() {
    let archive = pack("mine", parts());
    let trust = trusting(&[&key()], true);
    let without_lines = refusal(b"untrusted comment: x\n".to_vec(), &trust);
    assert_eq!(without_lines, "bundle: its signature does not have 4 lines");
    let wrong = [b"untrusted comment: x\ny\ntrusted comment: z\nw\n", &archive[..]].concat();
    let problem = refusal(wrong, &trust);
    assert!(problem.starts_with("bundle: its signature cannot be read"), "{problem}");
}

/// A folder of policies, and a profile that names `mine`.
struct Site {
    folder: tempfile::TempDir,
    config: PolicyConfig,
    params: BTreeMap<String, Param>,
}

impl Site {
    fn new(pair: &KeyPair) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = PolicyConfig {
            folder: folder.path().into(),
            trusted_keys: vec![pair.pk.to_base64()],
            deadline_ms: 10_000,
            ..PolicyConfig::default()
        };
        Self { folder, config, params: BTreeMap::new() }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.path().join(name)
    }

    fn load(&self, storage: &Storage) -> Result<Arc<Policies>, Error> {
        let profile = ProfilePolicies {
            // For the shipped `rules` with other bytes.
            grants: vec![Grant::Tokenizer],
            policies: vec!["mine".into()],
            params: self.params.clone(),
            ..ProfilePolicies::default()
        };
        let profiles = BTreeMap::from([("default".to_owned(), profile)]);
        Policies::load(&self.config, &profiles, storage).map(Arc::new)
    }
}

/// A bundle of the shipped policy `rules` in different versions: a custom section has the name.
fn rules(version: u8, golden: &str, schema: &str) -> Vec<u8> {
    let (component, _) = shipped("rules").unwrap();
    let component = [component, &[0, 2, 1, version]].concat();
    pack("mine", [&component, golden.as_bytes(), schema.as_bytes(), b"# mine\n"])
}

const RULES: &str = "[rules]\ntype = \"text\"\n[strict]\ntype = \"boolean\"\n";
const PASSES: &str = r#"{"hook":"on-request","input":{"params":[["rules","[[rule]]\ndo = { note = \"n\" }"]]},"answer":{"note":"n"}}
"#;

fn works(policies: &Policies) {
    let mut session = policies.start("default", "r", &no_vocabulary()).unwrap();
    let params = session.params.to_vec();
    let plan = session.ask(&RequestView { params, ..RequestView::default() }).unwrap();
    assert_eq!(plan.note.as_deref(), Some("one"));
}

fn active(policies: &Policies) -> (String, Option<String>) {
    let report = policies.report();
    (report.policies[0].sha256.clone(), report.policies[0].signed_by.clone())
}

fn problem(policies: &Policies) -> String {
    policies.report().policies[0].problem.clone().map(|p| p.message).unwrap_or_default()
}

fn one_rule() -> BTreeMap<String, Param> {
    BTreeMap::from([("rules".into(), "[[rule]]\ndo = { note = 'one' }".into())])
}

#[test]
fn a_server_with_keys_runs_signed_bundles_and_refuses_others_while_requests_run() {
    let (pair, stranger) = (key(), key());
    let mut site = Site::new(&pair);
    site.params = one_rule();
    // Signatures differ: they have the time.
    let signed = [b'a', b'b'].map(|version| sign(&pair, &rules(version, PASSES, RULES)));
    fs::write(site.path("mine.steer"), &signed[0]).unwrap();
    let storage = crate::storage();
    let policies = site.load(&storage).unwrap();
    let first = active(&policies);
    assert_eq!(first.1, Some(pair.pk.to_base64()));
    works(&policies);
    let mut flipped = signed[1].clone();
    *flipped.last_mut().unwrap() ^= 1;
    let wrong = PASSES.replace("\"note\":\"n\"}", "\"note\":\"m\"}");
    let refused = [
        (flipped, "its signature does not fit its content"),
        (sign(&stranger, &rules(b'b', PASSES, RULES)), "by no key of policy.trusted_keys"),
        (rules(b'b', PASSES, RULES), "the bundle is not signed"),
        (shipped("rules").unwrap().0.to_vec(), "the component is not signed"),
        (sign(&pair, &rules(b'b', &wrong, RULES)), "golden line 1"),
        (sign(&pair, &rules(b'b', PASSES, "[rule]\ntype = 'text'")), "did you mean `rule`?"),
        (sign(&pair, &pack("other", parts())), "contains `other.wasm`; that of policy `mine`"),
    ];
    for (file, words) in refused {
        let error = policies.upload("mine", &file).unwrap_err().to_string();
        assert!(error.starts_with("policy `mine`: ") && error.contains(words), "{error}");
        assert_eq!((active(&policies), problem(&policies)), (first.clone(), error));
        works(&policies);
    }
    let second = policies.upload("mine", &signed[1]).unwrap();
    assert_eq!(second.replaced.as_deref(), Some(first.0.as_str()));
    assert!(fs::read(site.path("mine.steer")).unwrap() == signed[1]);
    works(&policies);
    assert_eq!(policies.roll_back("mine").unwrap().sha256, first.0);
    assert!(fs::read(site.path("mine.steer")).unwrap() == signed[0]);
    // Neither does a start take what an upload does not.
    fs::write(site.path("mine.steer"), rules(b'c', PASSES, RULES)).unwrap();
    let restarted = site.load(&storage).unwrap();
    assert!(problem(&restarted).contains("the bundle is not signed"), "{}", problem(&restarted));
    works(&restarted);
    let error = site.load(&crate::storage()).err().unwrap().to_string();
    assert!(error.contains("mine.steer: bundle: the bundle is not signed"), "{error}");
}

fn wait(what: &str, happened: impl Fn() -> bool) {
    let started = Instant::now();
    while !happened() {
        assert!(started.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_bundle_in_the_watched_folder_precedes_a_component_and_a_component_that_is_pushed_replaces_it()
{
    let pair = key();
    let mut site = Site::new(&pair);
    (site.config.allow_unsigned, site.params) = (true, one_rule());
    let (component, _) = shipped("rules").unwrap();
    fs::write(site.path("mine.wasm"), component).unwrap();
    let policies = site.load(&crate::storage()).unwrap();
    assert_eq!(active(&policies).1, None);
    policies.watch();
    let put = |file: &[u8]| replace(&site.path("mine.steer"), file);
    put(&sign(&pair, &rules(b'a', PASSES, RULES)));
    wait("the bundle is active", || active(&policies).1.is_some());
    works(&policies);
    put(b"untrusted comment: nothing\n");
    wait("a broken bundle is reported", || problem(&policies).contains("does not have 4 lines"));
    works(&policies);
    policies.upload("mine", &[component, &[0, 2, 1, b'z']].concat()).unwrap();
    assert!(!Path::new(&site.path("mine.steer")).exists());
    works(&policies);
}

#[test]
fn a_misspelt_or_ill_typed_parameter_is_an_error_that_names_it() {
    let pair = key();
    let mut site = Site::new(&pair);
    fs::write(site.path("mine.steer"), sign(&pair, &rules(b'a', PASSES, RULES))).unwrap();
    let cases = [
        ("rule", "x", "is in no schema of its policies (mine); did you mean `rules`?"),
        (
            "mine.strct",
            "true",
            "is in no schema of its policies (mine); did you mean `mine.strict`?",
        ),
        ("temperature", "1", "they have rules, strict"),
        ("strict", "yes", "is \"yes\", must be true or false"),
        ("mine.strict", "1", "is \"1\", must be true or false"),
    ];
    for (name, text, words) in cases {
        site.params = one_rule();
        site.params.insert(name.into(), text.into());
        let error = site.load(&crate::storage()).err().expect(name).to_string();
        assert!(
            error.starts_with(&format!("profiles.default.params.{name}: "))
                && error.contains(words),
            "{error}"
        );
    }
    // The same, of a component and the files beside it, when a parameter changes.
    site.config.allow_unsigned = true;
    fs::remove_file(site.path("mine.steer")).unwrap();
    fs::write(site.path("mine.wasm"), shipped("rules").unwrap().0).unwrap();
    fs::write(site.path("mine.params.toml"), RULES).unwrap();
    fs::write(site.path("strict"), "false").unwrap();
    site.params = one_rule();
    site.params.insert("strict".into(), Param::File { file: site.path("strict") });
    let policies = site.load(&crate::storage()).unwrap();
    policies.watch();
    replace(&site.path("strict"), b"no");
    let problem =
        || policies.report().params[0].problem.clone().map(|p| p.message).unwrap_or_default();
    wait("the change is rejected", || !problem().is_empty());
    assert_eq!(problem(), "params `strict`: is \"no\", must be true or false");
    works(&policies);
    // And when the schema changes.
    replace(&site.path("strict"), b"false");
    wait("the change is taken back", || problem().is_empty());
    replace(&site.path("mine.params.toml"), b"[rules]\ntype = 'text'\n");
    wait("the schema is rejected", || self::problem(&policies).contains("params `strict`"));
    works(&policies);
}
