//! What a policy costs: the time of each hook as a request waits for it, and its fuel.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use steersman_engine::policy::Policy;
use steersman_engine::policy::golden::Golden;
use steersman_engine::policy::wasm::Component;

/// How long to measure.
const TIME: Duration = Duration::from_secs(3);

/// Steps of the built-in request.
const STEPS: u32 = 500;

/// A request with a long thought in which something happens at its end, and a call of a tool.
pub fn builtin() -> Golden {
    let mut text = String::from(
        r#"{"case":"built-in","hook":"on-prompt","input":{"system":["You answer briefly."]}}
{"hook":"on-request","input":{"prompt_tokens":900,"context_left":8192,"messages":2,"system_chars":4000,"user":"Who is the tallest?","tools":["search"],"can_think":true}}
"#,
    );
    for index in 1..=STEPS {
        let _ = writeln!(
            text,
            r#"{{"hook":"on-step","input":{{"index":{index},"phase":"think","think_tokens":{index},"think_left":9000,"tokens":[{index}],"text":" and"}}}}"#
        );
    }
    text.push_str(
        r#"{"hook":"on-step","input":{"index":501,"phase":"think","think_tokens":501,"loop_found":{"period":3,"repeats":50,"exact":true}}}
{"hook":"on-tool-call","input":{"name":"search","arguments":"{\"for\":\"the tallest\"}","digest":"00112233445566ff"}}
{"hook":"on-finish","input":{"reason":"stop","think_tokens":501}}
"#,
    );
    Golden::parse(&text).expect("a golden file")
}

#[derive(Default)]
struct Calls {
    times: Vec<Duration>,
    fuel: Vec<u64>,
}

/// Asks all that `golden` asks, again and again, and prints a table.
///
/// # Errors
/// When the policy fails, or the output is closed.
pub fn run(component: &Arc<Component>, golden: &Golden, out: &mut impl Write) -> Result<()> {
    // The first round, in which memory is touched and caches are cold, does not count.
    round(component, golden, &mut BTreeMap::new())?;
    let mut hooks = BTreeMap::new();
    let start = Instant::now();
    while start.elapsed() < TIME {
        round(component, golden, &mut hooks)?;
    }
    writeln!(
        out,
        "{:<13} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10}",
        "", "calls", "p50", "p99", "longest", "fuel p50", "most fuel"
    )?;
    let exported = component.hooks();
    for ((at, hook), Calls { mut times, mut fuel }) in hooks {
        if at > 0 && !exported.contains(&hook) {
            continue;
        }
        times.sort_unstable();
        fuel.sort_unstable();
        let at = |share: usize| (times.len() - 1) * share / 100;
        let us = |share| format!("{:.2} us", times[at(share)].as_secs_f64() * 1e6);
        let fuel = |share| match fuel.get(at(share)) {
            Some(fuel) => fuel.to_string(),
            None => "-".into(),
        };
        let count = times.len();
        writeln!(
            out,
            "{hook:<13} {count:>9} {:>9} {:>9} {:>9} {:>10} {:>10}",
            us(50),
            us(99),
            us(100),
            fuel(50),
            fuel(100)
        )?;
    }
    Ok(())
}

fn round(
    component: &Arc<Component>,
    golden: &Golden,
    hooks: &mut BTreeMap<(u8, &'static str), Calls>,
) -> Result<()> {
    for (at, case) in golden.cases.iter().enumerate() {
        let start = Instant::now();
        let mut instance = golden.start(at, component)?;
        hooks.entry((0, "instantiate")).or_default().times.push(start.elapsed());
        for line in case.lines.iter().filter(|line| !line.replaced) {
            let hook = line.question.hook();
            let start = Instant::now();
            let answer = line.question.ask(&mut instance);
            let took = start.elapsed();
            answer.map_err(|error| anyhow!("line {}: {error}", line.number))?;
            let calls = hooks.entry((1 + hook as u8, hook.name())).or_default();
            calls.times.push(took);
            calls.fuel.push(instance.cost().fuel);
        }
    }
    Ok(())
}
