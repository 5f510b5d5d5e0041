//! The policy `cache-friendly`: removes from system text what changes with every request, so that what follows can be
//! reused from the prefix cache.
//!
//! Claude Code's billing header is such text, ids and times of day are others; see [`noise`]. It decides nothing else,
//! and stands first in a chain.

use steersman_policy::{
    ParamsView, Plan, Policy, PreparedParams, PromptEdit, PromptView, RequestView, note,
    read_params,
};

#[path = "../../agent/src/noise.rs"]
mod noise;

use noise::Strip;

/// The policy `cache-friendly`.
#[derive(Default)]
pub struct CacheFriendly;

fn parse(params: &[(String, String)]) -> (Strip, Vec<String>) {
    let mut strip = Strip::default();
    let problems = read_params(params, |name, text| match name {
        "strip" => Some(text.parse().map(|parsed| strip = parsed).is_ok()),
        _ => None,
    });
    (strip, problems)
}

impl Policy for CacheFriendly {
    fn on_params(&mut self, params: ParamsView) -> PreparedParams {
        PreparedParams { problems: parse(&params.params).1, ..PreparedParams::default() }
    }

    fn on_prompt(&mut self, prompt: PromptView) -> Vec<PromptEdit> {
        parse(&prompt.params).0.edits(&prompt)
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        Plan { note: note(&parse(&request.params).1), ..Plan::default() }
    }
}

steersman_policy::export!(CacheFriendly, without on_tool_call);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_billing_block_and_a_clock_are_removed_and_the_rest_stays() {
        let text = "x-anthropic-billing-header: cc_version=2.1; cch=41c7b;\nYou are X.\n\
                    Current time: 2026-01-05 19:48\nBuild: 7\nBe brief.";
        let edited = |params: &[(&str, &str)]| {
            let params = params.iter().map(|(name, text)| ((*name).into(), (*text).into()));
            let prompt = PromptView {
                params: params.collect(),
                system: vec![text.into()],
                ..PromptView::default()
            };
            prompt.edited(&CacheFriendly.on_prompt(prompt.clone())).remove(0)
        };
        assert_eq!(edited(&[]), "You are X.\nCurrent time: 2026-01-05\nBuild: 7\nBe brief.");
        let more = edited(&[("strip", "Build:")]);
        assert_eq!(more, "You are X.\nCurrent time: 2026-01-05\nBe brief.");
        assert_eq!(edited(&[("strip", "off")]), text);
    }
}
