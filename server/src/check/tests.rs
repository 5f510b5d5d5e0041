//! Configurations with and without problems.

use super::*;

fn checked(path: &Path) -> (bool, String) {
    let mut out = Vec::new();
    let passed = run(path, None, &Storage::in_memory(), None, &mut out).is_ok();
    (passed, String::from_utf8(out).unwrap())
}

#[test]
fn every_problem_is_printed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("wrong.json"), "{\"messages\": [], \"tool\": []}").unwrap();
    let text = format!(
        "[server]\nbody_timeout_s = 0\n\
         [model]\npath = '{}'\n\
         [speculation]\ndepth = 9\n\
         [profiles.a]\nmodel = 'neither a folder nor a repo'\npolicies = ['{}', 'defualt']\n\
         sampling.min_p = nan\n\
         [profiles.b]\npolicies = ['{}']\nwarm = ['{}', '{}']\n",
        at("no-model"),
        at("first.wasm"),
        at("second.wasm"),
        at("absent.json"),
        at("wrong.json"),
    );
    std::fs::write(at("c.toml"), text).unwrap();
    let (passed, printed) = checked(&folder.path().join("c.toml"));
    assert!(!passed);
    let expected = [
        "line 2: server.body_timeout_s: is 0",
        "line 4: model.path: ",
        "line 6: speculation.depth: is 9",
        "line 8: profiles.a.model: ",
        "line 9: profiles.a.policies: policy `defualt`: is not a shipped policy, and policy.folder is not \
         set; did you mean `default`?",
        "line 9: profiles.a.policies: policy `first`: ",
        "line 10: profiles.a.sampling: min_p is NaN",
        "line 12: profiles.b.policies: policy `second`: ",
        "line 13: profiles.b.warm: ",
        "wrong.json: unknown field `tool`",
    ];
    assert_eq!(printed.lines().count(), expected.len(), "{printed}");
    for (line, words) in printed.lines().zip(expected) {
        assert!(line.contains(words), "`{words}` is not in {line}");
    }
}

/// `passthrough` was refused because it has the hook on-step, and an empty list of policies with the advice to name
/// `passthrough`.
#[test]
fn policies_that_change_what_was_written_need_an_upstream_that_continues_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("steersman.toml");
    for (policies, upstream, fits) in [
        ("'default'", "protocol = 'anthropic'", false),
        ("'passthrough', 'default'", "capabilities.kind = 'mlx-lm'", false),
        ("'passthrough'", "protocol = 'anthropic'", true),
        ("'default'", "capabilities.kind = 'vllm'", true),
        ("'default'", "protocol = 'anthropic'\nwithout_continuation = 'end'", true),
    ] {
        let text = format!(
            "[upstreams.up]\nurl = 'http://127.0.0.1:1'\n{upstream}\n\
             [profiles.default]\nupstreams = ['up']\npolicies = [{policies}]\n"
        );
        std::fs::write(&path, &text).unwrap();
        let (passed, printed) = checked(&path);
        assert_eq!(passed, fits, "{text}: {printed}");
        let words = "profiles.default.upstreams: the policy `default` may close the reasoning";
        assert_eq!(printed.contains(words), !fits, "{text}: {printed}");
    }
}

/// A file with three problems had "1 problem".
#[test]
fn problems_of_the_text_do_not_hide_those_of_policies() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("steersman.toml");
    let text = "[server]\nprot = 1\nbody_timeout_s = 0\n[engine]\nqueue = 'x'\n\
                [profiles.fast.params]\nreasoning_budgt = 100\n";
    std::fs::write(&path, text).unwrap();
    let (passed, printed) = checked(&path);
    assert!(!passed);
    let expected = [
        "line 2: server.prot: unknown key `prot`; did you mean `port`?",
        "line 3: server.body_timeout_s: is 0, must be from 1 to 3600",
        "line 5: engine.queue: is \"x\", expected a whole number, not below 0",
        "line 7: profiles.fast.params.reasoning_budgt: the policy `default` has no such parameter; did you \
         mean `reasoning_budget`?",
    ];
    assert_eq!(printed.lines().collect::<Vec<_>>(), expected);
}

/// A server refused what had "no problems".
#[test]
fn where_a_server_could_not_listen_or_write_is_a_problem() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = (folder.path().join("steersman.toml"), folder.path().join("file"));
    std::fs::write(&file, "").unwrap();
    let check = |text: &str, data_dir: &Path| {
        std::fs::write(&path, text).unwrap();
        let mut out = Vec::new();
        let passed = run(&path, Some(data_dir), &Storage::in_memory(), None, &mut out).is_ok();
        (passed, String::from_utf8(out).unwrap())
    };
    let traces =
        |name: &str| format!("[policy]\ntrace_file = '{}'\n", folder.path().join(name).display());
    let new = folder.path().join("new").join("data");
    // A relative one is in the working directory.
    for good in
        [String::new(), traces("trace.jsonl"), "[policy]\ntrace_file = 'trace.jsonl'\n".into()]
    {
        let (passed, printed) = check(&good, &new);
        assert!(passed, "{good}: {printed}");
    }
    assert!(!folder.path().join("trace.jsonl").exists(), "nothing is written");
    for (text, data_dir, words) in [
        (
            "[server]\nhost = 'http://127.0.0.1'\n".into(),
            &new,
            "line 2: server.host: `http://127.0.0.1` is neither",
        ),
        // Of a network for documents, which no machine has.
        (
            "[server]\nhost = '192.0.2.1'\n".into(),
            &new,
            "line 2: server.host: 192.0.2.1 is no address of this machine",
        ),
        ("[policy]\nfolder = 'none'\n".into(), &new, "line 2: policy.folder: none is not a folder"),
        (traces("none/trace.jsonl"), &new, "line 2: policy.trace_file: there is no folder"),
        (traces(""), &new, "line 2: policy.trace_file: "),
        (String::new(), &file, "the data folder: "),
        (String::new(), &file.join("data"), "the data folder: "),
    ] {
        let (passed, printed) = check(&text, data_dir);
        assert!(!passed && printed.contains(words), "{text}: {printed}");
    }
    assert!(!new.exists(), "check creates no data folder");
    // No user may write there, whatever the permissions say.
    #[cfg(target_os = "linux")]
    {
        let file = "/proc/sys/trace.jsonl";
        let (passed, printed) = check(&format!("[policy]\ntrace_file = '{file}'\n"), &new);
        let words = format!("line 2: policy.trace_file: {file} cannot be written (");
        assert!(!passed && printed.contains(&words), "{printed}");
    }
    // The same holds for a data folder.
    #[cfg(target_os = "linux")]
    for (data_dir, words) in [
        ("/proc/sys", "the data folder: /proc/sys cannot be written ("),
        (
            "/proc/sys/none/data",
            "the data folder: /proc/sys/none/data cannot be created in /proc/sys (",
        ),
    ] {
        let (passed, printed) = check("", Path::new(data_dir));
        assert!(!passed && printed.contains(words), "{printed}");
    }
}

/// It had "no problems", and a server took the model's context without a word.
#[test]
fn a_context_that_the_model_does_not_have_is_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("steersman.toml");
    let printed = |context: usize| {
        std::fs::write(&path, format!("[engine]\ncontext = {context}\n")).unwrap();
        let (passed, printed) = checked(&path);
        assert!(passed, "{printed}");
        printed
    };
    let most = hub::context_of("", 0).expect("the bundled model tells");
    let note = context_note(most + 1, most).unwrap();
    assert!(printed(most + 1).starts_with(&format!("warning: model.path: {note}\n")));
    for fits in [0, most] {
        assert!(!printed(fits).contains("engine.context"), "{fits}");
    }
}

#[test]
fn an_open_server_without_keys_is_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("steersman.toml");
    let warns = |text: &str| {
        std::fs::write(&path, format!("[server]\n{text}\n")).unwrap();
        let mut out = Vec::new();
        run(&path, Some(folder.path()), &Storage::in_memory(), None, &mut out).unwrap();
        String::from_utf8(out).unwrap().contains("warning: server.host: a server at ")
    };
    for open in ["host = '0.0.0.0'", "host = '::'"] {
        assert!(warns(open), "{open}");
    }
    // A name, which need not be known where the test runs.
    let named = ServerConfig { host: "model.lan".into(), ..ServerConfig::default() };
    assert_eq!(notes(&named, None).len(), 1);
    for closed in ["", "host = '::1'", "host = 'localhost'", "host = '0.0.0.0'\napi_keys = ['a']"] {
        assert!(!warns(closed), "{closed}");
    }
    let (task, none) = (keys::tests::create("laptop"), keys::Configured::default());
    keys::run(&task, &none, folder.path(), &mut Vec::new(), &mut Vec::new()).unwrap();
    assert!(!warns("host = '0.0.0.0'"));
}

#[test]
fn a_mistake_in_rules_is_a_problem() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("steersman.toml");
    let rules = "[[rule]]\ndo = { reason = true }";
    let profile = format!(
        "[profiles.p]\npolicies = ['rules']\n[profiles.p.params]\nrules = \"\"\"{rules}\"\"\"\n"
    );
    std::fs::write(&path, profile).unwrap();
    let (passed, printed) = checked(&path);
    let expected =
        "line 4: profiles.p.params.rules: policy `rules`: parameter `rules`: rule 1, line 2: ";
    assert!(!passed && printed.starts_with(expected), "{printed}");
    assert_eq!(printed.lines().count(), 1, "{printed}");

    // The key of a parameter for one policy has its name.
    let profile = "[profiles.a]\npolicies = ['agent']\n[profiles.a.params]\nreasoning_budget = 'many'\n\
                   [profiles.b]\npolicies = ['agent']\n[profiles.b.params]\nagent.reasoning_budget = 'many'\n";
    std::fs::write(&path, profile).unwrap();
    let (_, printed) = checked(&path);
    let problem = "policy `agent`: parameter `reasoning_budget` cannot be `many`";
    for expected in [
        format!("line 4: profiles.a.params.reasoning_budget: {problem}"),
        format!("line 8: profiles.b.params.agent.reasoning_budget: {problem}"),
    ] {
        assert!(printed.lines().any(|line| line.starts_with(&expected)), "{printed}");
    }
}

/// They had neither the line of the configuration nor the file with the rules, and an unknown parameter hid them.
#[test]
fn mistakes_in_all_parameters_are_problems_with_their_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("steersman.toml");
    let rules = folder.path().join("rules.toml").display().to_string();
    std::fs::write(&rules, "[[rule]]\ndo = { reason = true }").unwrap();
    let profile = "[profiles.p]\npolicies = ['default', 'rules', 'redact']\n[profiles.p.params]\n\
                   redact.patterns = 'phone'\n";
    let rules_at = format!("rules.rules = {{ file = '{rules}' }}\n");
    std::fs::write(&path, format!("{profile}{rules_at}")).unwrap();
    let (passed, printed) = checked(&path);
    let expected = [
        "line 4: profiles.p.params.redact.patterns: policy `redact`: parameter `patterns` cannot be `phone`"
            .to_owned(),
        format!("line 5: profiles.p.params.rules.rules: policy `rules`: {rules}: rule 1, line 2: "),
    ];
    let check = |printed: &str, expected: &[String]| {
        assert_eq!(printed.lines().count(), expected.len(), "{printed}");
        for (line, words) in printed.lines().zip(expected) {
            assert!(line.starts_with(words), "`{words}` is not at the beginning of {line}");
        }
    };
    assert!(!passed);
    check(&printed, &expected);
    std::fs::write(&path, format!("{profile}{rules_at}default.budgt = 1\n")).unwrap();
    let (_, printed) = checked(&path);
    let unknown =
        "line 6: profiles.p.params.default.budgt: the policy `default` has no such parameter";
    check(&printed, &[&expected[..], &[unknown.to_owned()]].concat());
}

/// A missing folder, policy, grant or file hid the mistakes in parameters, and a misspelt policy was offered as the remedy of
/// its own parameter.
#[test]
fn no_problem_hides_another() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("steersman.toml");
    let text = "[policy]\nfolder = '/no/such/folder'\n\
                [models.b]\npath = './nowhere.gguf'\n\
                [profiles.x]\npolicies = ['rules', 'redact', 'house']\n[profiles.x.params]\n\
                redact.patterns = 'phone'\nrules.strict = 'maybe'\nrules.rules = { file = '/no/rules.toml' }\nwhose = 1\n\
                [profiles.y]\npolicies = ['budgt', 'agent']\n[profiles.y.params]\n\
                budget.tokens_per_day = '5'\nagent.reasoning_budgt = 1\n\
                [profiles.z]\nshadow = ['budget']\npolicies = ['default']\n[profiles.z.params]\nbudget.tokens = '5'\n\
                budget.count_by = 'name'\n";
    std::fs::write(&path, text).unwrap();
    let (_, printed) = checked(&path);
    let expected = [
        "line 2: policy.folder: /no/such/folder is not a folder; create it",
        "line 4: models.b.path: ./nowhere.gguf does not exist",
        "line 8: profiles.x.params.redact.patterns: policy `redact`: parameter `patterns` cannot be `phone`",
        "line 9: profiles.x.params.rules.strict: policy `rules`: parameter `strict` cannot be `maybe`",
        "line 10: profiles.x.params.rules.rules: /no/rules.toml does not exist",
        "line 13: profiles.y.policies: policy `budgt`: ",
        "line 16: profiles.y.params.agent.reasoning_budgt: the policy `agent` has no such parameter; did you mean `reasoning_budget`?",
        "line 18: profiles.z.shadow: policy `budget`: imports `steersman:policy/kv@",
        "line 21: profiles.z.params.budget.tokens: the policy `budget` has no such parameter",
        "line 22: profiles.z.params.budget.count_by: policy `budget`: parameter `count_by` cannot be `name`",
    ];
    let lines: Vec<_> = printed.lines().collect();
    assert_eq!(lines.len(), expected.len(), "{printed}");
    for (line, words) in lines.iter().zip(expected) {
        assert!(line.starts_with(words), "`{words}` is not at the beginning of {line}");
    }
    assert!(
        printed.contains("did you mean `budget`?") && !printed.contains("mean `budgt`"),
        "{printed}"
    );
    // A server says the same.
    let error = all_problems(Some(&path), None, &Storage::in_memory(), None, anyhow!("one"));
    let told: Vec<_> =
        error.to_string().lines().skip(1).map(|line| line.trim().to_owned()).collect();
    assert_eq!(told, lines);
}

#[test]
fn configuration_without_problems_passes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/steersman.toml");
    let (passed, printed) = checked(&path);
    assert!(passed && printed.contains("no problems"), "{printed}");
    let (passed, printed) = checked(Path::new("/no/such.toml"));
    assert!(!passed && printed.contains("/no/such.toml"), "{printed}");
}
