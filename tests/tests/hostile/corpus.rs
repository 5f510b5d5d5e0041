//! Guests that load and then misbehave.

use steersman_tests::guest::{self, HOOKS, TYPES, component, data, importing, words};

/// A hook that never ends.
pub const FOREVER: &str = "(loop $l br $l) unreachable";

/// Where an action lies, of which the list stands at byte 0.
const ACTION: u32 = 16;

/// Where what an action names lies; the host writes from byte 4096 on.
const NAMED: u32 = 256;

/// A component that exports `on-step` alone.
pub fn stepper(body: &str, extra: &str) -> Vec<u8> {
    component(&[("on-step", body)], extra)
}

/// One whose `on-step` answers with the list that is given by its place and length, out of memory
/// that `extra` fills.
fn listing(place: u32, length: u32, extra: &str) -> Vec<u8> {
    stepper("i32.const 0", &format!("{} {extra}", data(0, &words(&[place, length]))))
}

/// One that answers with one action: number of its kind, and its words.
pub fn acting(kind: u32, payload: &[u32], extra: &str) -> Vec<u8> {
    let action = data(ACTION, &words(&[&[kind], payload].concat()));
    listing(ACTION, 1, &format!("{action} {extra}"))
}

/// One that injects the text at a place in memory.
fn injecting(place: u32, length: u32, extra: &str) -> Vec<u8> {
    acting(0, &[place, length], extra)
}

/// One whose action `sampling` changes the value with this number: 0 is the temperature.
fn sampling(value: usize, bits: u32) -> Vec<u8> {
    // Four options of two words each, then the steps.
    let mut payload = [0; 9];
    payload[2 * value] = 1;
    payload[2 * value + 1] = bits;
    acting(5, &payload, "")
}

/// One that adds a bias to a token.
fn biasing(token: u32, bias: f32) -> Vec<u8> {
    acting(4, &[NAMED, 1, 0], &data(NAMED, &words(&[token, bias.to_bits()])))
}

/// One whose `on-prompt` answers with so many replacements of a span in the text with this number.
fn replacing(count: u32, message: u32, old: &str) -> Vec<u8> {
    let span = words(&[message, NAMED * 8, old.len() as u32, 0, 0]);
    let list = span.repeat(count as usize);
    let memory =
        [data(0, &words(&[NAMED, count])), data(NAMED, &list), data(NAMED * 8, old.as_bytes())];
    component(&[("on-prompt", "i32.const 0")], &memory.join(" "))
}

/// One whose `on-step` calls a function of an interface, again and again.
fn flooding(interface: &str, call: &str) -> Vec<u8> {
    let body = format!("(loop $l {call} br $l) unreachable");
    importing(&[interface], &[("on-step", &body)], "")
}

/// One whose `on-step` calls a function once, or a few times.
fn asking(interface: &str, calls: &str) -> Vec<u8> {
    importing(&[interface], &[("on-step", &format!("{calls} i32.const 0"))], "")
}

/// One whose `on-step` makes handles of a resource of its own, again and again.
fn hoarding() -> Vec<u8> {
    let (name, signature, ty) = HOOKS[2];
    let text = format!(
        r#"(component {TYPES}
             (type $r (resource (rep i32)))
             (core func $new (canon resource.new $r))
             (core module $m
               (import "host" "new" (func $new (param i32) (result i32)))
               (memory (export "memory") 1)
               (func (export "realloc") (param i32 i32 i32 i32) (result i32) i32.const 4096)
               (func (export "{name}") {signature}
                 (loop $l (drop (call $new (i32.const 7))) br $l) unreachable))
             (core instance $i (instantiate $m (with "host" (instance (export "new" (func $new))))))
             (func $f {ty} (canon lift (core func $i "{name}") (memory (core memory $i "memory"))
               (realloc (core func $i "realloc"))))
             (instance $h (export "{name}" (func $f)))
             (export "steersman:policy/{name}@0.2.0" (instance $h)))"#
    );
    wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// A guest that misbehaves: name, component, hook, and words of the cause.
pub type Hostile = (&'static str, Vec<u8>, &'static str, &'static str);

/// All of them.
pub fn hostile() -> Vec<Hostile> {
    [endless(), greedy(), lying(), asking_too_much()].concat()
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
                r#"(func $realloc (export "realloc") (param i32 i32 i32 i32) (result i32) unreachable)"#,
            ),
            "on-step",
            "trapped",
        ),
        (
            "loops in realloc",
            stepper(
                "i32.const 0",
                &format!(
                    r#"(func $realloc (export "realloc") (param i32 i32 i32 i32) (result i32) {FOREVER})"#
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
    let megabyte = |length| {
        let action =
            [data(0, &words(&[ACTION, 1])), data(ACTION, &words(&[0, 65536, length]))].join(" ");
        stepper("(drop (memory.grow (i32.const 32))) i32.const 0", &action)
    };
    vec![
        ("grows memory", stepper(grow, ""), "on-step", "bytes of memory, may have"),
        ("grows a table", stepper(grow_table, table), "on-step", "table elements, may have"),
        (
            "allocates beyond its memory",
            stepper(
                "i32.const 0",
                r#"(func $realloc (export "realloc") (param i32 i32 i32 i32) (result i32) i32.const -8)"#,
            ),
            "on-step",
            "realloc return",
        ),
        ("hoards handles", hoarding(), "on-step", "handle"),
        ("returns a megabyte", megabyte(1 << 20), "on-step", "more than 16384 bytes"),
        ("returns a byte too many", injecting(4096, 16385, ""), "on-step", "more than 16384 bytes"),
        ("returns 128 MiB", injecting(0, 128 << 20, ""), "on-step", "out of bounds"),
        ("returns ten million items", listing(16, 10_000_000, ""), "on-step", "out of bounds"),
        ("returns 1,600 items", listing(16, 1600, ""), "on-step", "more than 16384 bytes"),
        ("returns 17 items", listing(16, 17, ""), "on-step", "more than 16 actions"),
        ("plans 17 keeps", guest::keeper(&[(1, 60); 17]), "on-request", "more than 16 anchors"),
        (
            "plans 5,000 keeps",
            guest::keeper(&[(1, 60); 5000]),
            "on-request",
            "more than 16 anchors",
        ),
        ("replaces 17 spans", replacing(17, 0, "B"), "on-prompt", "more than 16 replacements"),
        ("bans 257 tokens", acting(3, &[8192, 257, 0], ""), "on-step", "more than 256 tokens"),
        ("biases 257 tokens", acting(4, &[8192, 257, 0], ""), "on-step", "more than 256 tokens"),
        ("bans a million tokens", acting(3, &[0, 1_000_000, 0], ""), "on-step", "out of bounds"),
        (
            "repairs with a byte too many",
            component(&[("on-tool-call", "i32.const 0")], &data(0, &words(&[1, 4096, 16385]))),
            "on-tool-call",
            "more than 16384 bytes",
        ),
    ]
}

fn lying() -> Vec<Hostile> {
    let note = |bytes: &[u8]| {
        // In the record `plan` the note is at byte 80.
        let note = [data(80, &words(&[1, NAMED, bytes.len() as u32])), data(NAMED, bytes)];
        component(&[("on-request", "i32.const 0")], &note.join(" "))
    };
    // Likewise the sampling at byte 20.
    let plan = data(20, &words(&[1, f32::NAN.to_bits()]));
    let load = "(drop (i32.load (i32.const -4))) i32.const 0";
    vec![
        ("reads beyond its memory", stepper(load, ""), "on-step", "out of bounds"),
        ("returns a wild pointer", stepper("i32.const -16", ""), "on-step", "out of bounds"),
        (
            "returns invalid UTF-8",
            injecting(NAMED, 2, &data(NAMED, b"\xc3\x28")),
            "on-step",
            "utf-8",
        ),
        ("plans an invalid note", note(b"\xff"), "on-request", "utf-8"),
        ("returns an unknown action", acting(9, &[], ""), "on-step", "discriminant"),
        ("keeps at an unknown anchor", guest::keeper(&[(4, 60)]), "on-request", "discriminant"),
        (
            "returns an unknown verdict",
            component(&[("on-tool-call", "i32.const 0")], &data(0, &words(&[3]))),
            "on-tool-call",
            "discriminant",
        ),
        ("biases by NaN", biasing(1, f32::NAN), "on-step", "a bias is nan"),
        ("biases by infinity", biasing(1, f32::INFINITY), "on-step", "a bias is inf"),
        ("biases by -infinity", biasing(1, f32::NEG_INFINITY), "on-step", "a bias is -inf"),
        ("biases by 101", biasing(1, 101.0), "on-step", "a bias is 101"),
        ("biases no token", biasing(u32::MAX, 1.0), "on-step", "there is no token 4294967295"),
        (
            "bans no token",
            acting(3, &[NAMED, 1, 0], &data(NAMED, &words(&[u32::MAX]))),
            "on-step",
            "there is no token 4294967295",
        ),
        ("samples at NaN", sampling(0, f32::NAN.to_bits()), "on-step", "temperature is nan"),
        ("samples at 11", sampling(0, 11f32.to_bits()), "on-step", "temperature is 11"),
        ("samples at top-p 0", sampling(1, 0), "on-step", "top-p is 0"),
        ("samples at min-p 2", sampling(3, 2f32.to_bits()), "on-step", "min-p is 2"),
        (
            "plans at NaN",
            component(&[("on-request", "i32.const 0")], &plan),
            "on-request",
            "temperature is nan",
        ),
        (
            "replaces what is not there",
            replacing(1, 0, "Sunday"),
            "on-prompt",
            "message 0 does not have its span",
        ),
        (
            "replaces twice",
            replacing(2, 0, "Monday"),
            "on-prompt",
            "replacement 1: message 0 does not have its span",
        ),
        ("replaces nothing", replacing(1, 0, ""), "on-prompt", "empty span"),
        ("replaces elsewhere", replacing(1, 7, "B"), "on-prompt", "in message 7"),
    ]
}

fn asking_too_much() -> Vec<Hostile> {
    let times = "called more than 1024 times in one hook";
    let word = |call: &str| format!("(call ${call} (i32.const 0) (i32.const 8) (i32.const 64))");
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
        ("floods kv.get", flooding("kv", &word("kv.get")), "on-step", times),
        ("floods kv.set", flooding("kv", &set(8)), "on-step", times),
        (
            "floods the tokenizer",
            flooding("tokenizer", &word("tokenizer.encode")),
            "on-step",
            times,
        ),
        ("floods the counters", flooding("counters", count), "on-step", times),
        (
            "sets 3 MiB twice",
            asking("kv", &megabytes),
            "on-step",
            "kv.set: more than 4194304 bytes passed",
        ),
        ("logs 5 MB", asking("log", &grown(80, long)), "on-step", "more than 4194304 bytes"),
        (
            "encodes a byte too many",
            asking("tokenizer", &grown(1, text)),
            "on-step",
            "tokenizer.encode: the text has more than 65536 bytes",
        ),
        (
            "decodes a token too many",
            asking("tokenizer", &grown(1, tokens)),
            "on-step",
            "tokenizer.decode: there are more than 16384 tokens",
        ),
        (
            "logs invalid UTF-8",
            asking("log", &format!("(i32.store (i32.const 0) (i32.const -1)) {line}")),
            "on-step",
            "utf-8",
        ),
        (
            "logs at an unknown level",
            asking("log", "(call $log.write (i32.const 7) (i32.const 0) (i32.const 1))"),
            "on-step",
            "discriminant",
        ),
    ]
}
