//! The policy `json-agent`: every answer is one JSON object, for agents that parse it.
//!
//! Asks for it at the end of the system text, and enforces it: by the parameter `schema`, or as any object. A request
//! whose client demands a form of its own keeps that. With tools the model may call one instead, and the answer is
//! asked for and not enforced, so that a call is not made impossible.

use steersman_policy::{
    AnswerForm, Labels, ParamsView, Plan, Policy, PreparedParams, PromptEdit, PromptView,
    RequestView, Summary, note, read_params,
};

/// What the system text gets.
const INSTRUCTION: &str = "Answer with one JSON object and nothing else, unless you call a tool.";

/// Limit on reasoning tokens without the parameter `reasoning_budget`.
const REASONING_BUDGET: u32 = 1024;

/// The policy `json-agent`, with the state of one request.
#[derive(Default)]
pub struct JsonAgent {
    is_enforced: bool,
}

/// The parameters.
struct Settings {
    form: AnswerForm,
    instruction: String,
    reasoning_budget: u32,
    problems: Vec<String>,
}

impl Settings {
    fn parse(params: &[(String, String)]) -> Self {
        let mut settings = Self {
            form: AnswerForm::JsonObject,
            instruction: INSTRUCTION.into(),
            reasoning_budget: REASONING_BUDGET,
            problems: Vec::new(),
        };
        settings.problems = read_params(params, |name, text| match name {
            "schema" => {
                let is_object = text.trim_start().starts_with('{');
                if is_object {
                    settings.form = AnswerForm::JsonSchema(text.into());
                }
                Some(is_object)
            }
            "instruction" => {
                settings.instruction = text.into();
                Some(true)
            }
            "reasoning_budget" => {
                Some(text.parse().map(|tokens| settings.reasoning_budget = tokens).is_ok())
            }
            _ => None,
        });
        settings
    }
}

impl Policy for JsonAgent {
    fn on_params(&mut self, params: ParamsView) -> PreparedParams {
        let problems = Settings::parse(&params.params).problems;
        PreparedParams { problems, ..PreparedParams::default() }
    }

    fn on_prompt(&mut self, prompt: PromptView) -> Vec<PromptEdit> {
        let instruction = Settings::parse(&prompt.params).instruction;
        let gap = if prompt.system.iter().all(String::is_empty) { "" } else { "\n\n" };
        match instruction.as_str() {
            "" => Vec::new(),
            words => vec![PromptEdit::End(format!("{gap}{words}"))],
        }
    }

    fn on_request(&mut self, request: RequestView) -> Plan {
        let settings = Settings::parse(&request.params);
        self.is_enforced = request.form.is_none() && request.tools.is_empty();
        Plan {
            reasoning: request.reasoning,
            reasoning_budget: Some(settings.reasoning_budget),
            form: self.is_enforced.then_some(settings.form),
            note: note(&settings.problems),
            ..Plan::default()
        }
    }

    fn on_finish(&mut self, _: Summary) -> Labels {
        let json = if self.is_enforced { "enforced" } else { "asked" };
        vec![("json".into(), json.into())]
    }
}

steersman_policy::export!(JsonAgent, without on_tool_call);

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(params: &[(&str, &str)], tools: &[&str], form: Option<AnswerForm>) -> Plan {
        let params = params.iter().map(|(name, text)| ((*name).into(), (*text).into())).collect();
        let tools = tools.iter().map(|name| (*name).into()).collect();
        let request = RequestView { params, tools, form, ..RequestView::default() };
        JsonAgent::default().on_request(request)
    }

    #[test]
    fn a_form_is_enforced_unless_the_client_has_one_or_tools() {
        assert_eq!(plan(&[], &[], None).form, Some(AnswerForm::JsonObject));
        assert_eq!(plan(&[], &["look"], None).form, None);
        assert_eq!(plan(&[], &[], Some(AnswerForm::Regex("a".into()))).form, None);
        let schema = r#"{"type": "object"}"#;
        let planned = plan(&[("schema", schema)], &[], None);
        assert_eq!(planned.form, Some(AnswerForm::JsonSchema(schema.into())));
        let wrong = plan(&[("schema", "object")], &[], None);
        assert_eq!(wrong.note.as_deref(), Some("parameter `schema` cannot be `object`"));
    }

    #[test]
    fn the_instruction_is_added_where_there_is_no_system_text_too() {
        let edited = |system: &[&str]| {
            let system = system.iter().map(|text| (*text).into()).collect();
            let prompt = PromptView { system, ..PromptView::default() };
            prompt.edited(&JsonAgent::default().on_prompt(prompt.clone()))
        };
        assert_eq!(edited(&[]), [INSTRUCTION]);
        assert_eq!(edited(&["Be brief."]), [format!("Be brief.\n\n{INSTRUCTION}")]);
    }
}
