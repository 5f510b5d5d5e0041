//! `steersman policy bench`: time and fuel of each hook, as a request waits for it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use steersman_policy_host::{Component, Golden, Hook, Policy};

/// Duration of the measurement.
const DURATION: Duration = Duration::from_secs(3);

/// Steps of the example request before the loop.
const STEPS: u32 = 500;

/// A request with a long reasoning that ends in a loop, and a tool call.
pub fn example(params: &BTreeMap<String, String>) -> Golden {
    let mut text = String::from(
        r#"{"case":"example","hook":"on-prompt","input":{"system":["You answer briefly."]}}
{"hook":"on-request","input":{"prompt_tokens":900,"context_left":8192,"messages":2,"system_chars":4000,"user":"Who is the tallest?","tools":["search"],"can_reason":true}}
"#,
    );
    for index in 1..=STEPS {
        let _ = writeln!(
            text,
            r#"{{"hook":"on-step","input":{{"index":{index},"phase":"Reasoning","reasoning_tokens":{index},"reasoning_left":9000,"tokens":[{index}],"text":" and"}}}}"#
        );
    }
    text.push_str(
        r#"{"hook":"on-step","input":{"index":501,"phase":"Reasoning","reasoning_tokens":501,"loop_found":{"period":3,"repeats":50,"exact":true}}}
{"hook":"on-tool-call","input":{"name":"search","arguments":"{\"for\":\"the tallest\"}","digest":"00112233445566ff"}}
{"hook":"on-finish","input":{"reason":"stop","reasoning_tokens":501}}
"#,
    );
    let mut golden = Golden::parse(&text).expect("the example is a golden file");
    golden.add_params(params, false);
    golden
}

#[derive(Default)]
struct Samples {
    times: Vec<Duration>,
    fuel: Vec<u64>,
}

/// By hook; `None` is instantiation.
type SamplesByHook = BTreeMap<Option<Hook>, Samples>;

/// Makes all calls of `golden` again and again, and prints a table.
///
/// # Errors
/// When the policy fails, or the output is closed.
pub fn run(component: &Arc<Component>, golden: &Golden, out: &mut impl Write) -> Result<()> {
    // The first round touches memory and fills caches, so it does not count.
    round(component, golden, &mut BTreeMap::new())?;
    let mut samples = BTreeMap::new();
    let start = Instant::now();
    while start.elapsed() < DURATION {
        round(component, golden, &mut samples)?;
    }
    writeln!(
        out,
        "{:<13} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10}",
        "", "calls", "p50", "p99", "max", "fuel p50", "fuel max"
    )?;
    let exported = component.hooks();
    for (hook, Samples { mut times, mut fuel }) in samples {
        if hook.is_some_and(|hook| !exported.contains(&hook.name())) {
            continue;
        }
        times.sort_unstable();
        fuel.sort_unstable();
        let at = |percent: usize| (times.len() - 1) * percent / 100;
        let us = |percent| format!("{:.2} us", times[at(percent)].as_secs_f64() * 1e6);
        let fuel = |percent| fuel.get(at(percent)).map_or("-".into(), u64::to_string);
        writeln!(
            out,
            "{:<13} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10}",
            hook.map_or("instantiate", Hook::name),
            times.len(),
            us(50),
            us(99),
            us(100),
            fuel(50),
            fuel(100)
        )?;
    }
    Ok(())
}

fn round(component: &Arc<Component>, golden: &Golden, samples: &mut SamplesByHook) -> Result<()> {
    for case in &golden.cases {
        let start = Instant::now();
        let mut instance = case.start(component)?;
        samples.entry(None).or_default().times.push(start.elapsed());
        for line in case.lines.iter().filter(|line| !line.replaced) {
            let start = Instant::now();
            let answer = instance.call(&line.call);
            let time = start.elapsed();
            answer.map_err(|error| anyhow!("line {}: {error}", line.number))?;
            let samples = samples.entry(Some(line.call.hook())).or_default();
            samples.times.push(time);
            samples.fuel.push(instance.take_report().cost.fuel);
        }
    }
    Ok(())
}
