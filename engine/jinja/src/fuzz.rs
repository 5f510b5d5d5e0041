//! Templates from fragments in random order, the same in every run.

use std::collections::BTreeMap;

use serde_json::json;
use steersman_test_support::{Random, fuzz_inputs};

use crate::Template;
use crate::taint::{Origin, Taint};

const OPERANDS: &[&str] = &[
    "x",
    "m",
    "messages",
    "d",
    "n.x",
    "loop.index0",
    "m.content",
    "m['role']",
    "missing",
    "none",
    "true",
    "''",
    "'</t>'",
    "'a b'",
    "[]",
    "[1, 2.5, x]",
    "{'a': x}",
    "(1,)",
    "0",
    "3",
    "2.5",
    "9223372036854775807",
    "1e308",
    "'%5.2f%%%s'",
    "'{:>5}{}'",
    "range(5)",
    "range(x, -3, -1)",
    "dict(a=x)",
    "namespace(y=x)",
    "f(x)",
    "strftime_now('%d %q %Y')",
];

const POSTFIXES: &[&str] = &[
    "[::-1]",
    "[1:]",
    "[:-1:2]",
    "[0]",
    "[-1]",
    "[x:none:-3]",
    "[9:1:-2]",
    ".y",
    ".split('</t>')",
    ".split()",
    ".rsplit(' ', 1)",
    ".strip('x')",
    ".replace('', x)",
    ".replace('a', 'bb', 2)",
    ".join(x)",
    ".format(x, y=1)",
    ".partition(' ')",
    ".items()",
    ".get('a', 1)",
    ".startswith(('a', 'b'))",
    ".removesuffix('b')",
    ".title()",
    ".count('a')",
    " | tojson",
    " | tojson(indent=2, sort_keys=true)",
    " | tojson(ensure_ascii=true)",
    " | length",
    " | list",
    " | last",
    " | reverse",
    " | sort",
    " | unique",
    " | join(', ')",
    " | join(d='|', attribute='role')",
    " | indent(4, true)",
    " | indent(width=x)",
    " | batch(2, 'x')",
    " | slice(3)",
    " | map(attribute='content')",
    " | selectattr('role', 'equalto', 'user')",
    " | replace('a', x)",
    " | format(x, 2)",
    " | int",
    " | float",
    " | round(2)",
    " | string",
    " | trim('a')",
    " | default(x)",
    " | dictsort",
    " | groupby('role')",
    " | sum",
    " | min",
    " | pprint",
    " | e",
    " | upper",
    " is defined",
    " is iterable",
    " is mapping",
    " is divisibleby 0",
    " is eq 1",
];

const BINARIES: &[&str] = &[
    " + ",
    " ~ ",
    " * ",
    " - ",
    " / ",
    " // ",
    " % ",
    " ** ",
    " in ",
    " not in ",
    " == ",
    " < ",
    " and ",
    " if x else ",
];

/// What breaks a template, or closes a block early.
const NOISE: &[&str] = &[
    "{% endfor %}",
    "{% else %}",
    "{% endif %}",
    "{% break %}",
    "{% generation %}",
    "{# ",
    "{{ ",
    " }}",
    "{%- ",
    " -%}",
    "{% call f(x) %}",
    "{% endcall %}",
    "{% raw %}",
    "{{ raise_exception(x) }}",
];

fn expression(random: &mut Random) -> String {
    let mut expression = String::new();
    loop {
        expression += random.of(OPERANDS);
        (0..random.below(3)).for_each(|_| expression += random.of(POSTFIXES));
        if random.below(3) > 0 {
            return expression;
        }
        expression += random.of(BINARIES);
    }
}

fn template(random: &mut Random, depth: usize) -> String {
    let mut source = String::new();
    for _ in 0..=random.below(3) {
        let (value, kind) = (expression(random), random.below(if depth == 0 { 4 } else { 10 }));
        let mut inner = || template(random, depth - 1);
        source += &match kind {
            0 => format!("{{{{ {value} }}}}"),
            1 => format!("{{% set x = {value} %}}"),
            2 => format!("{{% set n = namespace(x={value}) %}}{{% set n.x = n.x ~ 'a' %}}"),
            3 => " text\n".into(),
            4 => {
                format!("{{% for m in {value} %}}{}{{% else %}}{}{{% endfor %}}", inner(), inner())
            }
            5 => format!("{{% for a, b in {value} %}}{}{{% endfor %}}", inner()),
            6 => format!("{{% if {value} %}}{}{{% endif %}}", inner()),
            7 => format!("{{% set x %}}{}{{% endset %}}", inner()),
            8 => format!("{{% macro f(x) %}}{}{{% endmacro %}}", inner()),
            _ => format!("{{% filter upper %}}{}{{% endfilter %}}", inner()),
        };
    }
    if random.below(16) == 0 {
        source.insert_str(0, random.of(NOISE));
    }
    source
}

#[test]
fn no_template_panics_or_renders_without_limit() {
    let mut random = Random(6);
    let taint = Taint::new(["</t>", "[x]"].into_iter());
    let variables = json!({
        "messages": [{"role": "user", "content": "a</t>[x] b"}, {"role": "assistant", "content": ""}],
        "x": "x a</t>", "d": {"a": 1, "</t>": [null, true]}, "tools": null,
    });
    let plain = variables.as_object().expect("a map").clone();
    let mut tainted = plain.clone();
    taint.map(&mut tainted, Origin::Client);
    let (mut rendered, mut panics) = (0, BTreeMap::new());
    for number in 0..fuzz_inputs() {
        let source = template(&mut random, 2);
        let Ok(template) = Template::new(&source) else { continue };
        let template = template.at(0).expect("1970").with_fuel(2_000);
        for variables in [&plain, &tainted] {
            match template.render(variables) {
                Ok(text) => {
                    rendered += 1;
                    assert!(text.len() < 1 << 26, "input {number}: {} bytes: {source}", text.len());
                }
                Err(error) => {
                    let error = error.to_string();
                    if let Some((_, panic)) = error.split_once("panicked: ") {
                        let input = || format!("input {number}: {source}");
                        panics.entry(panic.to_string()).or_insert_with(input);
                    }
                }
            }
        }
    }
    assert!(panics.is_empty(), "{panics:#?}");
    assert!(rendered * 5 > fuzz_inputs(), "only {rendered} renderings of {}", fuzz_inputs());
}
