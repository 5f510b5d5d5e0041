//! What authors do with a policy that exists: bundles, goldens that fail, presets, watch and sim.

use super::*;

use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A folder with all files of the bundle of `mine`, which is the shipped policy `rules`.
fn mine() -> TempDir {
    let (component, golden) = shipped("rules").unwrap();
    let schema =
        "[rules]\ntype = \"text\"\ndescription = \"the rules\"\n[strict]\ntype = \"boolean\"\n";
    let folder =
        folder(&[("mine.jsonl", golden), ("mine.params.toml", schema), ("README.md", "# mine\n")]);
    fs::write(folder.path().join("mine.wasm"), component).unwrap();
    folder
}

#[test]
fn a_bundle_is_made_signed_checked_tested_and_pushed() {
    let folder = mine();
    let [component, bundle, key] =
        ["mine.wasm", "mine.steer", "my.key"].map(|name| path(&folder, name));
    let keys = succeed(&["keygen", &key]);
    let public = keys.split('"').nth(1).expect("the key for the configuration").to_owned();
    assert!(fs::read_to_string(path(&folder, "my.pub")).unwrap().contains(&public), "{keys}");
    let mode = fs::metadata(&key).unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "others can read the key");
    assert!(fail(&["keygen", &key]).contains("already exists"));

    let made = succeed(&["bundle", &component, "--key", &key]);
    assert!(made.contains(" cases pass, signed by ") && made.contains(&public), "{made}");
    let checked = succeed(&["check", &bundle]);
    assert!(checked.contains("bundle    signed, not verified (policy.trusted_keys"), "{checked}");
    assert!(
        checked.contains("param     rules: text  the rules\nparam     strict: boolean"),
        "{checked}"
    );
    let config = folder.path().join("steersman.toml");
    fs::write(&config, format!("[policy]\ntrusted_keys = [\"{public}\"]\n")).unwrap();
    let config = config.display().to_string();
    let checked = succeed(&["check", &bundle, "--config", &config]);
    assert!(checked.contains(&format!("bundle    signed by {public}; ")), "{checked}");
    let mut changed = fs::read(&bundle).unwrap();
    *changed.last_mut().unwrap() ^= 1;
    let folder_of_changed = self::folder(&[]);
    let copy = path(&folder_of_changed, "mine.steer");
    fs::write(&copy, changed).unwrap();
    let refused = fail(&["check", &copy, "--config", &config]);
    assert!(refused.contains("mine.steer"), "{refused}");
    let tested = succeed(&["test", &bundle]);
    assert!(tested.ends_with(" cases pass\n"), "{tested}");
    let body = r#"{"name": "mine", "sha256": "0123456789abcdef", "replaced": null}"#;
    let (address, request) = serve_once("200 OK", body);
    succeed(&["push", "mine", &bundle, "--url", &address]);
    let length = fs::metadata(&bundle).unwrap().len();
    assert!(request.join().unwrap().to_lowercase().contains(&format!("content-length: {length}")));

    let unsigned = succeed(&["bundle", &component]);
    assert!(unsigned.ends_with(", unsigned\n"), "{unsigned}");
    let renamed = fail(&["bundle", &component, "--out", &path(&folder, "other.steer")]);
    assert!(
        renamed.contains("the name of a bundle is that of its policy, `mine.steer`"),
        "{renamed}"
    );
    let no_key = fail(&["bundle", &component, "--key", &component]);
    assert!(no_key.contains("mine.wasm: "), "{no_key}");
}

#[test]
fn a_bundle_that_a_server_would_refuse_is_not_made() {
    for (file, text, words) in [
        ("README.md", None, "README.md: No such file"),
        ("mine.params.toml", None, "which is an empty file for a policy without any"),
        ("mine.jsonl", None, "a bundle has a golden file"),
        (
            "mine.params.toml",
            Some("[rules]\ntype = 'txt'"),
            "mine.params.toml: TOML parse error at line 2",
        ),
        (
            "mine.jsonl",
            Some("{\"hook\":\"on-request\",\"answer\":{\"every\":7}}"),
            "-   \"every\": 7",
        ),
        ("mine.wasm", Some("no component"), "policy `mine`: is not a valid component"),
    ] {
        let folder = mine();
        match text {
            None => fs::remove_file(folder.path().join(file)).unwrap(),
            Some(text) => fs::write(folder.path().join(file), text).unwrap(),
        }
        let failed = fail(&["bundle", &path(&folder, "mine.wasm")]);
        assert!(failed.contains(words), "{file}: {failed}");
        assert!(!folder.path().join("mine.steer").exists(), "{file}");
    }
}

#[test]
fn a_parameter_of_a_command_is_checked_with_the_schema() {
    let folder = mine();
    let component = path(&folder, "mine.wasm");
    for command in ["test", "bench", "sim"] {
        let replies = path(&folder, "replies.jsonl");
        fs::write(&replies, "{\"text\": \"one\"}\n").unwrap();
        let file = if command == "sim" { &[&*component, &replies][..] } else { &[&*component][..] };
        let with = |param: &str| fail(&[&[command], file, &["--param", param]].concat());
        let unknown = with("rule=x");
        assert!(unknown.contains("--param: params `rule`: is in no schema"), "{unknown}");
        assert!(unknown.contains("did you mean `rules`?"), "{unknown}");
        assert!(with("strict=yes").contains("must be true or false"));
    }
}

/// It was shown as differences of `note`.
#[test]
fn a_misspelt_parameter_of_a_shipped_policy_ends_the_command() {
    for (policy, param, near) in [("rules", "rule", "rules"), ("default", "reasonng", "reasoning")]
    {
        let failed = fail(&["test", policy, "--param", &format!("{param}=on")]);
        let expected = format!(
            "error: --param: `{param}`: the policy `{policy}` has no such parameter; did you mean `{near}`?"
        );
        assert!(failed.contains(&expected), "{failed}");
    }
}

/// It was shown as differences of `note`.
#[test]
fn a_value_that_a_shipped_policy_cannot_use_ends_the_command() {
    let of = |params: &[&str]| {
        let options = params.iter().flat_map(|param| ["--param", param]);
        fail(&["test", "default"].into_iter().chain(options).collect::<Vec<_>>())
    };
    let one = of(&["reasoning_budget=abc"]);
    assert!(one.contains("error: --param: `reasoning_budget`: cannot be `abc`\n"), "{one}");
    let two = of(&["reasoning_budget=abc", "reasonng=on", "answer_reserve=x; y"]);
    assert!(two.contains("`reasoning_budget`: cannot be `abc`\n"), "{two}");
    assert!(two.contains("`answer_reserve`: cannot be `x; y`\n"), "{two}");
    assert!(two.contains("`reasonng`: the policy `default` has no such parameter"), "{two}");
    assert!(!two.contains("the answer differs"), "{two}");
}

/// A misspelt parameter was no error as long as the component had another name than the policy.
#[test]
fn a_next_version_is_tested_with_the_schema_beside_the_golden_file() {
    let folder = mine();
    let next = path(&folder, "next.wasm");
    fs::copy(path(&folder, "mine.wasm"), &next).unwrap();
    let golden = path(&folder, "mine.jsonl");
    let unknown = fail(&["test", &next, &golden, "--param", "rule=x"]);
    assert!(unknown.contains("--param: params `rule`: is in no schema"), "{unknown}");
    // Without a schema, the command says that there is none.
    fs::remove_file(folder.path().join("mine.params.toml")).unwrap();
    let (_, error, _) = run(&["test", &next, &golden, "--param", "rule=x"]);
    assert!(
        error.contains("next.params.toml: does not exist, so no schema checks --param"),
        "{error}"
    );
}

/// A mistake was shown as a difference of `note`, far below the line that had it.
#[test]
fn a_mistake_in_rules_is_reported_before_any_answer_with_its_file_rule_and_line() {
    let rules = "[[rule]]\nwhen = { prompt_over = 9 }\ndo = { route = \"large\" }\n\n\n\n\n[[rule]]\n\
                 do = { reasonin = true }\n";
    let golden = r#"{"hook":"on-request","answer":{"note":null}}"#;
    let folder = folder(&[("rules.toml", rules), ("mine.jsonl", golden)]);
    let [file, golden] = ["rules.toml", "mine.jsonl"].map(|name| path(&folder, name));
    let param = format!("rules=@{file}");
    for command in ["test", "bench", "replay"] {
        let failed = fail(&[command, "rules", &golden, "--param", &param]);
        let expected = format!(
            "error: {file}: rule 2, line 9: unknown key `do.reasonin`; did you mean `reasoning`?"
        );
        assert!(failed.contains(&expected) && !failed.contains("differs"), "{command}: {failed}");
    }
    let inline = fail(&["test", "rules", &golden, "--param", "rules=[[rule]]"]);
    let expected = "error: --param: parameter `rules`: rule 1, line 1: `do` is missing";
    assert!(inline.contains(expected), "{inline}");
    fs::write(&file, rules.replace("reasonin ", "reasoning ")).unwrap();
    assert_eq!(succeed(&["test", "rules", &golden, "--param", &param]), "1 case passes\n");
}

#[test]
fn a_large_component_is_said_to_be_compiled_and_is_compiled_once() {
    let (component, golden) = shipped("passthrough").unwrap();
    let folder = folder(&[("mine.jsonl", golden)]);
    // As large as one with an interpreter: a section that nobody reads.
    let (name, bytes) = (b"padding", 5 << 20);
    let mut padding = vec![0, 0, 0, 0, 0, name.len() as u8];
    let mut length = 1 + name.len() + bytes;
    for byte in &mut padding[1..5] {
        *byte = (length & 0x7f) as u8 | 0x80;
        length >>= 7;
    }
    padding[4] &= 0x7f;
    padding.extend_from_slice(name);
    padding.resize(padding.len() + bytes, 0);
    let file = folder.path().join("mine.wasm");
    fs::write(&file, [component, &padding].concat()).unwrap();
    let test = || {
        let output = Command::new(env!("CARGO_BIN_EXE_steersman-policy"))
            .args(["test", file.to_str().unwrap()])
            .env("STEERSMAN_DATA_DIR", folder.path().join("data"))
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{error}");
        error
    };
    let first = test();
    assert!(first.contains("mine.wasm, 5 MB: up to a minute of processor time"), "{first}");
    assert_eq!(test(), "", "the data folder has it");
}

#[test]
fn a_hook_that_the_component_does_not_export_is_reported_by_build_and_check() {
    let folder = project();
    let source = "fine\n\nclass OnText(exports.OnText):\n    pass\n";
    fs::write(folder.path().join("brief.py"), source).unwrap();
    let warning = "brief.py:3: `on-text` is defined and not exported, so it is never called: add \
                   `export on-text;` to wit/world.wit\n";
    let built = succeed(&["build", folder.path().to_str().unwrap()]);
    assert!(built.contains("warning: ") && built.contains(warning), "{built}");
    let checked = succeed(&["check", &path(&folder, "brief.wasm")]);
    assert!(checked.contains(warning), "{checked}");
}

/// It was a traceback of 67 lines that did not name `wit/world.wit`.
#[test]
fn a_hook_in_python_that_the_world_lacks_is_an_error_without_a_traceback() {
    let folder = project();
    let script = "#!/bin/sh\necho 'Traceback (most recent call last):' >&2\n\
                  echo \"AttributeError: module 'wit_world.exports' has no attribute 'OnText'\" >&2\nexit 1\n";
    fs::write(folder.path().join(".venv/bin/componentize-py"), script).unwrap();
    let failed = fail(&["build", folder.path().to_str().unwrap()]);
    let expected = "wit/world.wit does not export `on-text`: add `export on-text;` to wit/world.wit, then build again";
    assert!(failed.contains(expected) && !failed.contains("Traceback"), "{failed}");
}

#[test]
fn a_policy_in_python_cannot_have_the_name_of_a_module() {
    let folder = folder(&[]);
    let into = folder.path().display().to_string();
    let refused = fail(&["new", "json", "--lang", "python", "--into", &into]);
    assert!(refused.contains("`json` is the name of a Python module"), "{refused}");
    succeed(&["new", "json", "--lang", "c", "--into", &into]);
}

#[test]
fn the_server_is_that_of_the_configuration_and_a_missing_one_is_named() {
    let folder = folder(&[("steersman.toml", "[server]\nhost = \"0.0.0.0\"\nport = 9\n")]);
    let config = path(&folder, "steersman.toml");
    let missing = fail(&["list", "--config", &config]);
    let expected = "http://127.0.0.1:9: no server answers there; start one with `steersman serve`";
    assert!(missing.contains(expected), "{missing}");
}

#[test]
fn a_password_encrypts_the_secret_key() {
    let folder = mine();
    let [component, key] = ["mine.wasm", "my.key"].map(|name| path(&folder, name));
    let with = |password: Option<&str>, arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_steersman-policy"));
        command
            .args(arguments)
            .env("STEERSMAN_DATA_DIR", folder.path())
            .env_remove("STEERSMAN_KEY_PASSWORD");
        command.envs(password.map(|password| ("STEERSMAN_KEY_PASSWORD", password)));
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    assert!(with(Some("right"), &["keygen", &key]).0);
    let bundle = ["bundle", component.as_str(), "--key", &key];
    assert!(with(Some("right"), &bundle).0);
    let (done, error) = with(Some("wrong"), &bundle);
    assert!(!done && error.contains("my.key: the password does not fit"), "{error}");
    let (done, error) = with(None, &bundle);
    assert!(
        !done && error.contains("the key has a password; set STEERSMAN_KEY_PASSWORD"),
        "{error}"
    );
}

#[test]
fn a_golden_file_presets_what_imports_find() {
    let line = r#"{"case":"a user","hook":"on-request","given":{"kv":{"19675 fedcba9876543210":"600"}},"input":{"params":[["tokens_per_day","1000"]],"time":1700000000,"caller":{"key":"0123456789abcdef","user":"fedcba9876543210","metadata":[],"headers":[]}},"answer":{"max_tokens":400}}"#;
    let folder =
        folder(&[("given.jsonl", line), ("typo.jsonl", &line.replace("\"kv\":", "\"kw\":"))]);
    assert_eq!(succeed(&["test", "budget", &path(&folder, "given.jsonl")]), "1 case passes\n");
    let typo = fail(&["test", "budget", &path(&folder, "typo.jsonl")]);
    assert!(typo.contains("typo.jsonl: line 1: ") && typo.contains("unknown field `kw`"), "{typo}");
}

const CORPUS: &str = r#"{"id": "a refusal", "text": "Well. As an AI model I cannot say more about this long matter."}
{"text": "One two three."}
"Only an answer, as an AI"

{"reasoning": "alpha beta gamma alpha beta gamma alpha beta gamma alpha beta gamma alpha beta gamma alpha beta gamma alpha beta gamma alpha beta gamma alpha beta gamma", "text": "Done."}
"#;

const SIM_RULES: &str = r#"
[[rule]]
when = { text_contains = "as an AI" }
do = { stop = "a refusal" }
[[rule]]
when = { text_contains = "As an AI" }
do = { stop = "a refusal" }
[[rule]]
when = { loop = true, phase = "reasoning" }
do = { close_reasoning = "In short: " }
[[rule]]
do = { loops = { repeats = 3, min_tokens = 9, max_period = 8 } }
[[rule]]
when = { user_contains = "bomb" }
do = { refuse = "Not here.", status = 451 }
"#;

#[test]
fn sim_shows_what_a_policy_would_have_cut() {
    let refused = r#"{"user": "A bomb?", "text": "one two three"}"#;
    let folder =
        folder(&[("corpus.jsonl", &format!("{CORPUS}{refused}\n")), ("rules.toml", SIM_RULES)]);
    let corpus = path(&folder, "corpus.jsonl");
    let rules = format!("rules=@{}", path(&folder, "rules.toml"));
    let shown = succeed(&["sim", "rules", &corpus, "--param", &rules]);
    assert!(
        shown.contains("a refusal: 13 words, 9 saved\n  stops at word 4: \"a refusal\"\n"),
        "{shown}"
    );
    assert!(shown.contains("line 5: 28 words, "), "{shown}");
    assert!(shown.contains("  closes the reasoning (a loop of 3 words, "), "{shown}");
    assert!(shown.contains("line 6: 3 words, 3 saved\n  refuses with 451: Not here.\n"), "{shown}");
    assert!(shown.contains(" of 5 replies changed; "), "{shown}");
    assert!(!shown.contains("line 2:"), "nothing happens to it: {shown}");
    let nothing = succeed(&["sim", "passthrough", &corpus]);
    assert!(nothing.starts_with("0 of 5 replies changed; 0 of "), "{nothing}");
}

/// `policy sim` called every hook but `on-text`, and printed `0 of 1 replies changed` for a policy with that hook alone.
#[test]
fn sim_shows_what_a_policy_replaces_in_answers() {
    let corpus = r#"{"text": "mail me at a@b.com now"}
{"reasoning": "it is a@b.com", "text": "at the end: c@d.org"}
{"text": "nothing of that kind"}
"#;
    let trace = r#"{"request":"r1","hook":"on-request","input":{}}
{"request":"r1","hook":"on-text","input":{"text":"mail a@b"}}
{"request":"r1","hook":"on-text","input":{"position":5,"text":"a@b.com now","end":true}}
"#;
    let folder = folder(&[("corpus.jsonl", corpus), ("trace.jsonl", trace)]);
    let corpus = path(&folder, "corpus.jsonl");
    let shown = succeed(&["sim", "redact", &corpus]);
    let first = r#"line 1: 5 words, 0 saved
  replaces "a@b.com " at word 5: "[redacted] "
"#;
    assert!(shown.contains(first), "{shown}");
    let second = "line 2: 7 words, 0 saved\n  replaces \"c@d.org\" at word 7: \"[redacted]\"\n";
    assert!(shown.contains(second), "{shown}");
    assert!(
        shown.contains("2 of 3 replies changed; ") && shown.ends_with("replaces 2\n"),
        "{shown}"
    );
    let off = succeed(&["sim", "redact", &corpus, "--param", "patterns=none"]);
    assert!(off.starts_with("0 of 3 replies changed; "), "{off}");
    let traced = succeed(&["sim", "redact", &path(&folder, "trace.jsonl")]);
    assert!(traced.contains("r1: 3 words, 0 saved\n  replaces \"a@b.com \" at word 3"), "{traced}");
}

#[test]
fn sim_reads_traces_and_names_what_it_cannot_read() {
    let trace = r#"{"request":"r1","hook":"on-request","input":{"user":"Hi"}}
{"request":"r1","hook":"on-step","input":{"phase":"Reasoning","text":"So it is"}}
{"request":"r1","hook":"on-step","input":{"phase":"Answer","text":" what it is, as an AI would say to all of you and more and more"}}
"#;
    let masked = trace.replacen("\"input\"", "\"masked\":{},\"input\"", 1);
    let folder = folder(&[
        ("trace.jsonl", trace),
        ("masked.jsonl", &masked),
        ("wrong.jsonl", "{\"text\": \"a\"}\n{\"txt\": \"b\"}\n"),
        ("rules.toml", SIM_RULES),
    ]);
    let rules = format!("rules=@{}", path(&folder, "rules.toml"));
    let sim = |file: &str| run(&["sim", "rules", &path(&folder, file), "--param", &rules]);
    let (shown, error, done) = sim("trace.jsonl");
    assert!(done && shown.contains("r1: 19 words, 10 saved\n  stops at word 9"), "{shown}{error}");
    let (_, error, done) = sim("masked.jsonl");
    assert!(!done && error.contains("masked.jsonl: the trace has no texts: line 1: "), "{error}");
    let (_, error, done) = sim("wrong.jsonl");
    assert!(!done && error.contains("wrong.jsonl:2: unknown field `txt`"), "{error}");
}

/// A folder whose compiler is a script: it makes a component of `brief.component`, or fails if the source has
/// the word `mistake`.
fn project() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    let (component, golden) = shipped("passthrough").unwrap();
    write("brief.py", b"fine");
    write("brief.jsonl", golden.as_bytes());
    write("brief.component", component);
    write("wit/policy.wit", b"");
    write("wit/world.wit", b"");
    let script = "#!/bin/sh\ngrep -q mistake brief.py && { echo \"brief.py:1: a mistake\" >&2; exit 1; }\n\
                  for last; do :; done\ncp brief.component \"$last\"\n";
    write(".venv/bin/componentize-py", script.as_bytes());
    let tool = folder.path().join(".venv/bin/componentize-py");
    fs::set_permissions(tool, fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

#[test]
fn what_does_not_build_or_pass_is_not_pushed() {
    let folder = project();
    let into = folder.path().to_str().unwrap();
    // Nobody listens there.
    let once = ["watch", into, "--once", "--url", "http://127.0.0.1:9"];
    fs::write(folder.path().join("brief.py"), "mistake").unwrap();
    let failed = fail(&once);
    assert!(
        failed.contains("brief.py:1: a mistake") && failed.contains("componentize-py` failed"),
        "{failed}"
    );
    assert!(!failed.contains("127.0.0.1:9"), "{failed}");
    fs::write(folder.path().join("brief.py"), "fine").unwrap();
    let golden = "{\"hook\":\"on-request\",\"answer\":{\"every\":7}}\n";
    fs::write(folder.path().join("brief.jsonl"), golden).unwrap();
    let failed = fail(&once);
    assert!(failed.contains("brief.jsonl:1: ") && failed.contains("-   \"every\": 7"), "{failed}");
    assert!(
        failed.contains("unexpected answers: 1") && !failed.contains("127.0.0.1:9"),
        "{failed}"
    );
    fs::remove_file(folder.path().join("brief.jsonl")).unwrap();
    assert!(fail(&once).contains("brief.jsonl: does not exist; what is pushed is tested first"));
}

#[test]
fn watch_builds_tests_and_pushes_at_each_save() {
    let folder = project();
    let body = r#"{"name": "mine", "sha256": "0123456789abcdef", "replaced": "fedcba9876543210"}"#;
    // One answer for each push; the address stays.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (sender, pushed) = std::sync::mpsc::channel();
    let response = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let (mut head, mut length) = (String::new(), 0);
            while !head.ends_with("\r\n\r\n") {
                let before = head.len();
                stream.read_line(&mut head).unwrap();
                if let Some(value) = head[before..].to_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
            }
            stream.read_exact(&mut vec![0; length]).unwrap();
            stream.get_mut().write_all(response.as_bytes()).unwrap();
            if sender.send(head).is_err() {
                return;
            }
        }
    });
    let mut watch = Command::new(env!("CARGO_BIN_EXE_steersman-policy"))
        .args(["watch", folder.path().to_str().unwrap(), "--name", "mine", "--url", &address])
        .env("STEERSMAN_DATA_DIR", folder.path().join(".venv"))
        .env_remove("STEERSMAN_CONFIG")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut until = |words: &str| {
        let started = Instant::now();
        let mut all = String::new();
        for line in lines.by_ref() {
            all += &format!("{line}\n");
            assert!(started.elapsed() < Duration::from_secs(120), "{words}: {all}");
            if line.contains(words) {
                return all;
            }
        }
        panic!("{words}: {all}");
    };
    until("mine: 0123456789ab is active, replacing fedcba987654");
    until("waiting for changes in");
    assert!(pushed.recv().unwrap().starts_with("POST /v1/policies/mine HTTP"));
    fs::write(folder.path().join("brief.py"), "mistake").unwrap();
    assert!(until("not pushed: ").contains("componentize-py` failed"));
    until("waiting for changes in");
    fs::write(folder.path().join("brief.py"), "fine again").unwrap();
    until("is active");
    pushed.recv().unwrap();
    assert!(pushed.try_recv().is_err(), "a mistake was pushed");
    watch.kill().unwrap();
    watch.wait().unwrap();
}
