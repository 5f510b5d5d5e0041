//! Guests written as text: a core module, wrapped as `wit-bindgen` wraps one.

use std::fmt::Write as _;

/// The types of the contract, as a component imports them.
pub const TYPES: &str = r#"
(import "steersman:policy/types@0.1.0" (instance $types
  (type $params (list (tuple string string)))
  (type $request' (record
    (field "id" string) (field "profile" string) (field "model" string) (field "family" string)
    (field "params" $params) (field "prompt-tokens" u32) (field "context-left" u32)
    (field "messages" u32) (field "system-chars" u32) (field "user" string)
    (field "tools" (list string)) (field "can-think" bool) (field "thinking" (option bool))
    (field "think-budget" (option u32)) (field "max-tokens" (option u32))))
  (export "request" (type $request (eq $request')))
  (type $rule' (record (field "max-period" u32) (field "repeats" u32) (field "min-tokens" u32)
    (field "similarity" f32)))
  (export "loop-rule" (type $rule (eq $rule')))
  (type $anchor' (enum "system" "turns" "prompt" "reply"))
  (export "anchor" (type $anchor (eq $anchor')))
  (type $keep' (record (field "at" $anchor) (field "seconds" u32)))
  (export "keep" (type $keep (eq $keep')))
  (type $plan' (record (field "thinking" (option bool)) (field "think-budget" (option u32))
    (field "answer-reserve" (option u32)) (field "loops" (option $rule)) (field "every" u32)
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
  (type $action' (variant (case "inject" string) (case "close-thinking" string)
    (case "stop" string)))
  (export "action" (type $action (eq $action')))
  (type $summary' (record (field "reason" string) (field "prompt-tokens" u32)
    (field "think-tokens" u32) (field "answer-tokens" u32) (field "loops" u32)))
  (export "summary" (type $summary (eq $summary')))
))
(alias export $types "request" (type $request)) (alias export $types "plan" (type $plan))
(alias export $types "step" (type $step)) (alias export $types "action" (type $action))
(alias export $types "summary" (type $summary))
"#;

/// What a hook's core function takes, and the type that it is lifted to.
const HOOKS: [(&str, &str, &str); 3] = [
    ("on-request", "(param i32) (result i32)", r#"(param "request" $request) (result $plan)"#),
    (
        "on-step",
        "(param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)",
        r#"(param "step" $step) (result (list $action))"#,
    ),
    ("on-finish", "(param i32 i32 i32 i32 i32 i32)", r#"(param "summary" $summary)"#),
];

/// A component with the given hooks: name and body of the core function. `extra` goes into the core
/// module, which has one page of memory, zero but for what `extra` puts there; byte 0 on is free
/// for answers, and what the host passes lands from byte 4096 on, again and again.
///
/// # Panics
/// When that is no text of a component.
pub fn component(hooks: &[(&str, &str)], extra: &str) -> Vec<u8> {
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
               (export "steersman:policy/{name}@0.1.0" (instance ${name}))"#
        );
    }
    let text = format!(
        r#"(component {TYPES}
             (core module $m (memory (export "memory") 1) {realloc} {extra} {core})
             (core instance $i (instantiate $m))
             {lifted})"#
    );
    wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// A component whose plan says what is kept and nothing else: number of the anchor in the contract,
/// and seconds.
pub fn keeper(keeps: &[(u8, u32)]) -> Vec<u8> {
    // Behind the longest text that the host may write.
    const LIST: u32 = 20_992;
    let word = |n: u32| n.to_le_bytes();
    let list = [word(1), word(LIST), word(keeps.len() as u32)].concat();
    let entries: Vec<u8> =
        keeps.iter().flat_map(|&(at, seconds)| [word(at.into()), word(seconds)].concat()).collect();
    let text = |bytes: &[u8]| bytes.iter().map(|b| format!("\\{b:02x}")).collect::<String>();
    // In the record `plan` the list is at byte 56.
    let data = format!(
        r#"(data (i32.const 56) "{}") (data (i32.const {LIST}) "{}")"#,
        text(&list),
        text(&entries)
    );
    component(&[("on-request", "i32.const 0")], &data)
}
