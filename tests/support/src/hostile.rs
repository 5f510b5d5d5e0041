//! Guests that load and then misbehave.

use crate::guest::{
    Answers, Value, answering, case, component, encode, float, importing, list, record, retaining,
    some, text, word,
};

/// A body that never ends.
pub const FOREVER: &str = "(loop $l br $l) unreachable";

/// A component that exports `on-step`, with this body.
pub fn stepper(body: &str, extra: &str) -> Vec<u8> {
    component(&[("on-step", body)], extra)
}

/// Is called after every token, and counts `rounds` rounds of a loop before it answers with nothing. A
/// round takes about five units of fuel.
pub fn counting(rounds: u32) -> Vec<u8> {
    let mut answers = Answers::default();
    let plan = answers.add("on-request", &record([("every", word(1))]));
    let nothing = answers.add("on-step", &list([]));
    let plan = format!("i32.const {plan}");
    let count = format!(
        "(local $left i32) (local.set $left (i32.const {rounds}))
        (loop $l (br_if $l (local.tee $left (i32.sub (local.get $left) (i32.const 1)))))
        i32.const {nothing}"
    );
    component(&[("on-request", &plan), ("on-step", &count)], &answers.data())
}

/// A component that always answers with one action.
pub fn acting(action: &'static str, payload: Value) -> Vec<u8> {
    answering("on-step", &list([case(action, payload)]))
}

/// An answer of `on-step` whose list is at `address`.
fn listing(address: u32, length: u32) -> Vec<u8> {
    answering("on-step", &Value::Words(vec![address, length]))
}

/// Injects the text at `address`.
fn injecting(address: u32, length: u32) -> Vec<u8> {
    acting("inject", Value::Words(vec![address, length]))
}

/// Changes one value of sampling.
fn sampling(value: &'static str, number: f32) -> Vec<u8> {
    let patch = record([(value, some(float(number)))]);
    acting("sampling", record([("sampling", patch)]))
}

/// Biases one token.
fn biasing(token: u32, bias: f32) -> Vec<u8> {
    let one = record([("token", word(token)), ("bias", float(bias))]);
    acting("bias", record([("tokens", list([one]))]))
}

/// Bans or biases the tokens at `address`.
fn naming(action: &'static str, address: u32, tokens: u32) -> Vec<u8> {
    acting(action, record([("tokens", Value::Words(vec![address, tokens]))]))
}

/// Replaces a span of a system text by nothing, `count` times.
fn replacing(count: usize, message: u32, old: &str) -> Vec<u8> {
    let one = record([("message", word(message)), ("old", text(old))]);
    let one = case("replace", one);
    answering("on-prompt", &list(vec![one; count]))
}

/// Uses an import without end.
fn flooding(interface: &str, call: &str) -> Vec<u8> {
    let body = format!("(loop $l {call} br $l) unreachable");
    importing(&[interface], &[("on-step", &body)], "")
}

/// Uses an import and makes no decision.
fn using(interface: &str, calls: &str) -> Vec<u8> {
    importing(&[interface], &[("on-step", &format!("{calls} i32.const 0"))], "")
}

/// Creates handles of a resource of its own without end.
fn hoarding() -> Vec<u8> {
    encode(
        "export private: interface { resource handle; }",
        &[],
        &[("on-step", "(loop $l (drop (call $new (i32.const 7))) br $l) unreachable")],
        r#"(import "[export]private" "[resource-new]handle" (func $new (param i32) (result i32)))"#,
        "",
    )
}

/// A guest that misbehaves: name, component, the hook that fails, and words of the cause in lower case.
pub type Hostile = (&'static str, Vec<u8>, &'static str, &'static str);

/// All guests that load and misbehave.
pub fn hostile() -> Vec<Hostile> {
    [endless(), greedy(), invalid(), overusing()].concat()
}

fn endless() -> Vec<Hostile> {
    let recursion = "(func $r (param i64 i64) (result i64) (i64.add (call $r (local.get 0) (local.get 1)) (local.get 0)))";
    let recurse = "(drop (call $r (i64.const 1) (i64.const 2))) i32.const 0";
    let fill = "(drop (memory.grow (i32.const 200)))
        (loop $l (memory.fill (i32.const 0) (i32.const 1) (i32.const 13000000)) br $l) unreachable";
    let forever = |hook| component(&[(hook, FOREVER)], "");
    vec![
        ("loops in on-prompt", forever("on-prompt"), "on-prompt", "used up its fuel of 10000000"),
        ("loops in on-request", forever("on-request"), "on-request", "used up its fuel"),
        ("loops in on-step", forever("on-step"), "on-step", "used up its fuel"),
        ("loops in on-tool-call", forever("on-tool-call"), "on-tool-call", "used up its fuel"),
        ("loops in on-finish", forever("on-finish"), "on-finish", "used up its fuel"),
        ("fills memory", stepper(fill, ""), "on-step", "used up its fuel"),
        ("recurses", stepper(recurse, recursion), "on-step", "call stack exhausted"),
        ("traps", stepper("unreachable", ""), "on-step", "trapped"),
        (
            "traps in on-prompt",
            component(&[("on-prompt", "unreachable")], ""),
            "on-prompt",
            "trapped",
        ),
        (
            "traps in realloc",
            stepper(
                "i32.const 0",
                r#"(func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32) unreachable)"#,
            ),
            "on-step",
            "trapped",
        ),
        (
            "loops in realloc",
            stepper(
                "i32.const 0",
                &format!(
                    r#"(func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32) {FOREVER})"#
                ),
            ),
            "on-step",
            "used up its fuel",
        ),
    ]
}

fn greedy() -> Vec<Hostile> {
    let grow = "(loop $l (drop (memory.grow (i32.const 16))) br $l) unreachable";
    let table = "(table $t 1 funcref)";
    let grow_table = "(drop (table.grow $t (ref.null func) (i32.const 100000))) unreachable";
    let wild =
        r#"(func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32) i32.const -8)"#;
    let mut answers = Answers::default();
    let megabyte = list([case("inject", Value::Words(vec![65536, 1 << 20]))]);
    let megabyte = answers.add("on-step", &megabyte);
    let megabyte = format!("(drop (memory.grow (i32.const 32))) i32.const {megabyte}");
    let megabyte = stepper(&megabyte, &answers.data());
    let repair = case("repair", Value::Words(vec![4096, 16385]));
    let too_long = "answered with more than 16384 bytes";
    let unreadable = "(an answer may have 16384 bytes)";
    let retentions = "more than 16 entries in `retain`";
    vec![
        ("grows memory", stepper(grow, ""), "on-step", "bytes of memory, the limit is"),
        ("grows a table", stepper(grow_table, table), "on-step", "table elements, the limit is"),
        ("allocates outside its memory", stepper("i32.const 0", wild), "on-step", "realloc return"),
        ("hoards handles", hoarding(), "on-step", "handle"),
        ("returns a megabyte", megabyte, "on-step", unreadable),
        ("returns a byte too many", injecting(4096, 16385), "on-step", too_long),
        ("returns 128 MiB", injecting(0, 128 << 20), "on-step", "out of bounds"),
        ("returns ten million actions", listing(16, 10_000_000), "on-step", "out of bounds"),
        ("returns 1,600 actions", listing(16, 1600), "on-step", unreadable),
        ("returns 17 actions", listing(16, 17), "on-step", "more than 16 actions"),
        ("retains 17 times", retaining(&[("turns", 60); 17]), "on-request", retentions),
        ("retains 5,000 times", retaining(&[("turns", 60); 5000]), "on-request", retentions),
        ("replaces 17 spans", replacing(17, 0, "B"), "on-prompt", "more than 16 edits"),
        ("bans 257 tokens", naming("ban", 8192, 257), "on-step", "more than 256 tokens"),
        ("biases 257 tokens", naming("bias", 8192, 257), "on-step", "more than 256 tokens"),
        ("bans a million tokens", naming("ban", 0, 1_000_000), "on-step", "out of bounds"),
        (
            "repairs with a byte too many",
            answering("on-tool-call", &repair),
            "on-tool-call",
            too_long,
        ),
    ]
}

fn invalid() -> Vec<Hostile> {
    let noting = |bytes: &[u8]| answering("on-request", &record([("note", some(text(bytes)))]));
    let hot = record([("temperature", some(float(f32::NAN)))]);
    let planning = answering("on-request", &record([("sampling", hot)]));
    let unknown = |hook| answering(hook, &Value::Words(vec![200]));
    let save_point = record([("at", word(200))]);
    let save_point = answering("on-request", &record([("retain", some(list([save_point])))]));
    let action = answering("on-step", &list([Value::Words(vec![200])]));
    let ban = acting("ban", record([("tokens", list([word(u32::MAX)]))]));
    let load = "(drop (i32.load (i32.const -4))) i32.const 0";
    let absent = "token 4294967295 is not in the vocabulary";
    let no_span = "message 0 does not contain its span";
    vec![
        ("reads outside its memory", stepper(load, ""), "on-step", "out of bounds"),
        ("returns a wild pointer", stepper("i32.const -16", ""), "on-step", "out of bounds"),
        ("returns invalid UTF-8", acting("inject", text(b"\xc3\x28")), "on-step", "utf-8"),
        ("plans an invalid note", noting(b"\xff"), "on-request", "utf-8"),
        ("returns an unknown action", action, "on-step", "discriminant"),
        ("retains at an unknown save point", save_point, "on-request", "discriminant"),
        ("returns an unknown verdict", unknown("on-tool-call"), "on-tool-call", "discriminant"),
        ("biases by NaN", biasing(1, f32::NAN), "on-step", "bias is nan"),
        ("biases by infinity", biasing(1, f32::INFINITY), "on-step", "bias is inf"),
        ("biases by -infinity", biasing(1, f32::NEG_INFINITY), "on-step", "bias is -inf"),
        ("biases by 101", biasing(1, 101.0), "on-step", "bias is 101"),
        ("biases no token", biasing(u32::MAX, 1.0), "on-step", absent),
        ("bans no token", ban, "on-step", absent),
        ("samples at NaN", sampling("temperature", f32::NAN), "on-step", "temperature is nan"),
        ("samples at 11", sampling("temperature", 11.0), "on-step", "temperature is 11"),
        ("samples at top-p 0", sampling("top-p", 0.0), "on-step", "top-p is 0"),
        ("samples at min-p 2", sampling("min-p", 2.0), "on-step", "min-p is 2"),
        ("plans at NaN", planning, "on-request", "temperature is nan"),
        ("replaces absent text", replacing(1, 0, "Sunday"), "on-prompt", no_span),
        (
            "replaces twice",
            replacing(2, 0, "Monday"),
            "on-prompt",
            "edit 1: message 0 does not contain its span",
        ),
        ("replaces nothing", replacing(1, 0, ""), "on-prompt", "empty span"),
        ("replaces elsewhere", replacing(1, 7, "B"), "on-prompt", "names message 7 of 1"),
    ]
}

fn overusing() -> Vec<Hostile> {
    let times = "used imports more than 1024 times in one call";
    let ask = |call: &str| format!("(call ${call} (i32.const 0) (i32.const 8) (i32.const 64))");
    let grown = |pages: u32, call: &str| format!("(drop (memory.grow (i32.const {pages}))) {call}");
    let set = |length: u32| {
        format!(
            "(call $kv.set (i32.const 0) (i32.const 8) (i32.const 0) (i32.const {length}) (i32.const 64))"
        )
    };
    let line = "(call $log.write (i32.const 1) (i32.const 0) (i32.const 8))";
    let count = "(call $counters.add (i32.const 0) (i32.const 8) (i64.const 1))";
    let megabytes = grown(60, &[set(3 << 20), set(3 << 20)].concat());
    let long = "(call $log.write (i32.const 1) (i32.const 0) (i32.const 5000000))";
    let text = "(call $tokenizer.encode (i32.const 0) (i32.const 65537) (i32.const 64))";
    let tokens = "(call $tokenizer.decode (i32.const 0) (i32.const 16385) (i32.const 64))";
    vec![
        ("floods the log", flooding("log", line), "on-step", times),
        ("floods kv.get", flooding("kv", &ask("kv.get")), "on-step", times),
        ("floods kv.set", flooding("kv", &set(8)), "on-step", times),
        ("floods the tokenizer", flooding("tokenizer", &ask("tokenizer.encode")), "on-step", times),
        ("floods the counters", flooding("counters", count), "on-step", times),
        (
            "sets 3 MiB twice",
            using("kv", &megabytes),
            "on-step",
            "kv.set: passed more than 4194304 bytes",
        ),
        ("logs 5 MB", using("log", &grown(80, long)), "on-step", "cannot be read"),
        (
            "encodes a byte too many",
            using("tokenizer", &grown(1, text)),
            "on-step",
            "tokenizer.encode: text of more than 65536 bytes",
        ),
        (
            "decodes a token too many",
            using("tokenizer", &grown(1, tokens)),
            "on-step",
            "tokenizer.decode: more than 16384 tokens",
        ),
        (
            "logs invalid UTF-8",
            using("log", &format!("(i32.store (i32.const 0) (i32.const -1)) {line}")),
            "on-step",
            "utf-8",
        ),
        (
            "logs at an unknown level",
            using("log", "(call $log.write (i32.const 200) (i32.const 0) (i32.const 1))"),
            "on-step",
            "discriminant",
        ),
    ]
}
