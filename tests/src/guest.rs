//! Guests of contract 0.2 written as text: a core module, wrapped as `wit-bindgen` wraps one.

use std::fmt::Write as _;

/// The types of the contract, as a component imports them.
pub const TYPES: &str = r#"
(import "steersman:policy/types@0.2.0" (instance $types
  (type $params (list (tuple string string)))
  (type $prompt' (record (field "profile" string) (field "params" $params)
    (field "system" (list string))))
  (export "prompt" (type $prompt (eq $prompt')))
  (type $replacement' (record (field "message" u32) (field "old" string) (field "new" string)))
  (export "replacement" (type $replacement (eq $replacement')))
  (type $sampling' (record (field "temperature" (option f32)) (field "top-p" (option f32))
    (field "top-k" (option u32)) (field "min-p" (option f32))))
  (export "sampling" (type $sampling (eq $sampling')))
  (type $request' (record
    (field "id" string) (field "profile" string) (field "model" string) (field "family" string)
    (field "params" $params) (field "prompt-tokens" u32) (field "context-left" u32)
    (field "messages" u32) (field "system-chars" u32) (field "user" string)
    (field "tools" (list string)) (field "can-think" bool) (field "thinking" (option bool))
    (field "think-budget" (option u32)) (field "max-tokens" (option u32))
    (field "sampling" $sampling) (field "seed" u64)))
  (export "request" (type $request (eq $request')))
  (type $rule' (record (field "max-period" u32) (field "repeats" u32) (field "min-tokens" u32)
    (field "similarity" f32)))
  (export "loop-rule" (type $rule (eq $rule')))
  (type $anchor' (enum "system" "turns" "prompt" "reply"))
  (export "anchor" (type $anchor (eq $anchor')))
  (type $keep' (record (field "at" $anchor) (field "seconds" u32)))
  (export "keep" (type $keep (eq $keep')))
  (type $plan' (record (field "thinking" (option bool)) (field "think-budget" (option u32))
    (field "answer-reserve" (option u32)) (field "sampling" $sampling)
    (field "loops" (option $rule)) (field "every" u32) (field "checkpoint-every" u32)
    (field "note" (option string)) (field "keep" (option (list $keep)))))
  (export "plan" (type $plan (eq $plan')))
  (type $phase' (enum "think" "answer" "tool-call"))
  (export "phase" (type $phase (eq $phase')))
  (type $report' (record (field "period" u32) (field "repeats" u32) (field "exact" bool)))
  (export "loop-report" (type $report (eq $report')))
  (type $step' (record (field "index" u32) (field "phase" $phase) (field "think-tokens" u32)
    (field "answer-tokens" u32) (field "think-left" u32) (field "tokens" (list u32))
    (field "text" string) (field "loop-found" (option $report)) (field "budget-reached" bool)))
  (export "step" (type $step (eq $step')))
  (type $ban' (record (field "tokens" (list u32)) (field "steps" u32)))
  (export "ban" (type $ban (eq $ban')))
  (type $token-bias' (record (field "token" u32) (field "bias" f32)))
  (export "token-bias" (type $token-bias (eq $token-bias')))
  (type $bias' (record (field "tokens" (list $token-bias)) (field "steps" u32)))
  (export "bias" (type $bias (eq $bias')))
  (type $resample' (record (field "sampling" $sampling) (field "steps" u32)))
  (export "resample" (type $resample (eq $resample')))
  (type $action' (variant (case "inject" string) (case "close-thinking" string)
    (case "rewind" u32) (case "ban" $ban) (case "bias" $bias) (case "sampling" $resample)
    (case "stop" string)))
  (export "action" (type $action (eq $action')))
  (type $earlier' (record (field "name" string) (field "arguments" string)
    (field "answered" (option string))))
  (export "earlier-call" (type $earlier (eq $earlier')))
  (type $tool-call' (record (field "name" string) (field "arguments" string)
    (field "digest" string) (field "index" u32) (field "earlier" (list $earlier))))
  (export "tool-call" (type $tool-call (eq $tool-call')))
  (type $verdict' (variant (case "accept") (case "repair" string) (case "stop" string)))
  (export "verdict" (type $verdict (eq $verdict')))
  (type $summary' (record (field "reason" string) (field "prompt-tokens" u32)
    (field "think-tokens" u32) (field "answer-tokens" u32) (field "loops" u32)
    (field "tool-calls" u32)))
  (export "summary" (type $summary (eq $summary')))
))
(alias export $types "prompt" (type $prompt))
(alias export $types "replacement" (type $replacement))
(alias export $types "request" (type $request)) (alias export $types "plan" (type $plan))
(alias export $types "step" (type $step)) (alias export $types "action" (type $action))
(alias export $types "tool-call" (type $tool-call)) (alias export $types "verdict" (type $verdict))
(alias export $types "summary" (type $summary))
"#;

/// The hooks: what the core function takes and returns, and the type that it is lifted to.
pub const HOOKS: [(&str, &str, &str); 5] = [
    (
        "on-prompt",
        "(param i32 i32 i32 i32 i32 i32) (result i32)",
        r#"(param "prompt" $prompt) (result (list $replacement))"#,
    ),
    ("on-request", "(param i32) (result i32)", r#"(param "request" $request) (result $plan)"#),
    (
        "on-step",
        "(param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)",
        r#"(param "step" $step) (result (list $action))"#,
    ),
    (
        "on-tool-call",
        "(param i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)",
        r#"(param "call" $tool-call) (result $verdict)"#,
    ),
    ("on-finish", "(param i32 i32 i32 i32 i32 i32 i32)", r#"(param "summary" $summary)"#),
];

/// The interfaces that a guest may import: name, and its types and functions as it imports them.
const INTERFACES: [(&str, &str); 5] = [
    ("failure", r#"(export "fail" (func (param "why" string)))"#),
    (
        "log",
        r#"(type $level' (enum "debug" "info" "warn")) (export "level" (type $level (eq $level')))
           (export "write" (func (param "level" $level) (param "line" string)))"#,
    ),
    (
        "kv",
        r#"(type $refusal' (enum "bad-key" "full"))
           (export "refusal" (type $refusal (eq $refusal')))
           (export "get" (func (param "key" string) (result (option string))))
           (export "set" (func (param "key" string) (param "value" string)
             (result (result (error $refusal)))))
           (export "delete" (func (param "key" string) (result bool)))"#,
    ),
    (
        "tokenizer",
        r#"(export "encode" (func (param "text" string) (result (list u32))))
           (export "decode" (func (param "tokens" (list u32)) (result string)))"#,
    ),
    ("counters", r#"(export "add" (func (param "name" string) (param "by" u64)))"#),
];

/// Their functions, and what the core module imports them as: text and lists are a pointer and a
/// length, and an answer of more than one word goes where the last parameter points.
const FUNCTIONS: [(&str, &str, &str); 8] = [
    ("failure", "fail", "(param i32 i32)"),
    ("log", "write", "(param i32 i32 i32)"),
    ("kv", "get", "(param i32 i32 i32)"),
    ("kv", "set", "(param i32 i32 i32 i32 i32)"),
    ("kv", "delete", "(param i32 i32) (result i32)"),
    ("tokenizer", "encode", "(param i32 i32 i32)"),
    ("tokenizer", "decode", "(param i32 i32 i32)"),
    ("counters", "add", "(param i32 i32 i64)"),
];

/// A component with the given hooks: name and body of the core function. `extra` goes into the core
/// module, which has one page of memory, zero but for what `extra` puts there; byte 0 on is free
/// for answers, and what the host passes lands from byte 4096 on, again and again.
///
/// # Panics
/// When that is no text of a component.
pub fn component(hooks: &[(&str, &str)], extra: &str) -> Vec<u8> {
    importing(&[], hooks, extra)
}

/// The same with imported interfaces, whose functions the bodies call as `$kv.get`.
///
/// # Panics
/// When that is no text of a component.
pub fn importing(interfaces: &[&str], hooks: &[(&str, &str)], extra: &str) -> Vec<u8> {
    let realloc = if extra.contains("$realloc") {
        ""
    } else {
        r#"(func $realloc (export "realloc") (param i32 i32 i32 i32) (result i32) i32.const 4096)"#
    };
    let (mut core, mut lifted) = (String::new(), String::new());
    for (name, body) in hooks {
        let (_, signature, ty) =
            HOOKS.iter().find(|(hook, ..)| hook == name).expect("one of HOOKS");
        let _ = write!(core, r#"(func (export "{name}") {signature} {body})"#);
        let _ = write!(
            lifted,
            r#"(func ${name} {ty}
                 (canon lift (core func $i "{name}") (memory (core memory $i "memory")) (realloc (core func $i "realloc"))))
               (instance ${name} (export "{name}" (func ${name})))
               (export "steersman:policy/{name}@0.2.0" (instance ${name}))"#
        );
    }
    // What the host answers needs a memory before there is an instance of the module that asks.
    let (mut imported, mut lowered) = (String::new(), String::new());
    let (mut core_imports, mut with) = (String::new(), String::new());
    for (interface, items) in INTERFACES.iter().filter(|(name, _)| interfaces.contains(name)) {
        let _ = write!(
            imported,
            r#"(import "steersman:policy/{interface}@0.2.0" (instance ${interface} {items}))"#
        );
        for (_, name, signature) in FUNCTIONS.iter().filter(|(of, ..)| of == interface) {
            let id = format!("{interface}.{name}");
            let _ = write!(
                lowered,
                r#"(core func ${id} (canon lower (func ${interface} "{name}") (memory (core memory $libc "memory")) (realloc (core func $libc "realloc"))))"#
            );
            let _ = write!(core_imports, r#"(import "host" "{id}" (func ${id} {signature}))"#);
            let _ = write!(with, r#"(export "{id}" (func ${id}))"#);
        }
    }
    let text = format!(
        r#"(component {TYPES} {imported}
             (core module $libc (memory (export "memory") 1)
               (func (export "realloc") (param i32 i32 i32 i32) (result i32) i32.const 4096))
             (core instance $libc (instantiate $libc))
             {lowered}
             (core module $m {core_imports} (import "libc" "memory" (memory 1))
               (export "memory" (memory 0)) {realloc} {extra} {core})
             (core instance $i (instantiate $m (with "libc" (instance $libc))
               (with "host" (instance {with}))))
             {lifted})"#
    );
    wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// The bytes of `data` at an address, as an item of a core module.
pub fn data(address: u32, bytes: &[u8]) -> String {
    let text: String = bytes.iter().map(|byte| format!("\\{byte:02x}")).collect();
    format!(r#"(data (i32.const {address}) "{text}")"#)
}

/// Words as they lie in a guest's memory.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A component whose plan says what is kept and nothing else: number of the anchor in the contract,
/// and seconds.
pub fn keeper(keeps: &[(u8, u32)]) -> Vec<u8> {
    // Behind the longest text that the host may write.
    const LIST: u32 = 20_992;
    // In the record `plan` the list is at byte 92.
    let list = data(92, &words(&[1, LIST, keeps.len() as u32]));
    let entries: Vec<u32> = keeps.iter().flat_map(|&(at, seconds)| [at.into(), seconds]).collect();
    component(&[("on-request", "i32.const 0")], &format!("{list} {}", data(LIST, &words(&entries))))
}
