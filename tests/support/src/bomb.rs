//! Components that take more time or memory to compile than their size suggests.

use std::fmt::Write;

/// Names and components. A server with two x86-64 cores took 833 MB to over 6 GB, or minutes, for each.
pub fn bombs() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("components instantiated twice, 30 deep", wat(&doubled(30))),
        ("components instantiated twice, one after another", wat(&chained(30))),
        ("components nested 50,000 deep", nested(50_000)),
        (
            "20,000 locals and ifs",
            wat(&function(20_000, &"(if (local.get 0) (then))".repeat(20_000))),
        ),
        ("9,000 locals and 20,000 ifs", wat(&function(9_000, &branches(9_000, 20_000)))),
        ("20,000 table.copy", wat(&function(0, &TABLE_COPY.repeat(20_000)))),
        ("200,000 ifs", wat(&function(0, &"(if (local.get 0) (then))".repeat(200_000)))),
    ]
}

/// The bomb that takes longest: no count shows it.
pub fn slow() -> Vec<u8> {
    wat(&function(0, &TABLE_COPY.repeat(20_000)))
}

const TABLE_COPY: &str = "(table.copy (local.get 0) (local.get 0) (local.get 0))";

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap_or_else(|error| panic!("{error}"))
}

/// Each level stands for twice the instances of the next.
fn doubled(levels: usize) -> String {
    let open = "(component $c".repeat(levels);
    let innermost = "(component $c (core module $m) (core instance (instantiate $m)))";
    let twice = "(instance (instantiate $c)) (instance (instantiate $c)))".repeat(levels);
    format!("{open}{innermost}{twice}")
}

/// The same without nesting.
fn chained(count: usize) -> String {
    let mut text = String::from(
        "(component $root (component $c0 (core module $m) (core instance (instantiate $m)))",
    );
    for n in 1..count {
        let before = n - 1;
        let _ = write!(
            text,
            "(component $c{n} (alias outer $root $c{before} (component $c))
               (instance (instantiate $c)) (instance (instantiate $c)))"
        );
    }
    let _ = write!(text, "(instance (instantiate $c{})))", count - 1);
    text
}

/// Components in one another; as text they would overflow the stack of the parser.
fn nested(levels: usize) -> Vec<u8> {
    const EMPTY: &[u8] = b"\0asm\x0d\0\x01\0";
    let mut sizes = vec![EMPTY.len()];
    for _ in 1..levels {
        let inner = sizes[sizes.len() - 1];
        sizes.push(EMPTY.len() + 1 + leb128(inner).len() + inner);
    }
    let mut bytes = Vec::new();
    for &inner in sizes[..levels - 1].iter().rev() {
        bytes.extend(EMPTY);
        // The section of a component.
        bytes.push(4);
        bytes.extend(leb128(inner));
    }
    bytes.extend(EMPTY);
    bytes
}

fn leb128(mut number: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

/// A component with one function.
fn function(locals: usize, body: &str) -> String {
    let locals = "i32 ".repeat(locals);
    format!(
        "(component (core module (table 10 funcref)
           (func (export \"f\") (param i32) (local {locals}) {body})))"
    )
}

/// Each branch changes a local.
fn branches(locals: usize, count: usize) -> String {
    let branch = |n: usize| {
        let local = n % locals + 1;
        let other = (n * 7) % locals + 1;
        format!(
            "(if (local.get 0) (then (local.set {local}
               (i32.add (local.get {other}) (local.get {local})))))"
        )
    };
    (0..count).map(branch).collect()
}
