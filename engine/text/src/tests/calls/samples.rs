//! What the chat templates of families write, and what names their formats.

use super::*;

/// One call of each format in the words of its chat template.
#[test]
fn every_format_reads_what_its_template_writes() {
    let call = r#"call[f {"text":"a b","count":5}]"#;
    let json = r#"{"text": "a b", "count": 5}"#;
    for (name, source) in [
        (
            "hermes",
            format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {json}}}\n</tool_call>"),
        ),
        (
            "qwen",
            "<tool_call>\n<function=f>\n<parameter=text>\na b\n</parameter>\n\
             <parameter=count>\n5\n</parameter>\n</function>\n</tool_call>"
                .into(),
        ),
        ("llama-3", format!("{{\"name\": \"f\", \"parameters\": {json}}}")),
        ("llama-3", format!("<|python_tag|>{{\"name\": \"f\", \"parameters\": {json}}}")),
        ("llama-3", format!("{{\"type\": \"function\", \"name\": \"f\", \"parameters\": {json}}}")),
        ("mistral", format!("[TOOL_CALLS]f[ARGS]{json}")),
        ("mistral", format!("[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{json}")),
        (
            "mistral-list",
            format!(
                "[TOOL_CALLS][{{\"name\": \"f\", \"arguments\": {json}, \"id\": \"abc123def\"}}]"
            ),
        ),
        (
            "glm",
            "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a b</arg_value>\n\
             <arg_key>count</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
                .into(),
        ),
        (
            "glm",
            "<tool_call>f<arg_key>text</arg_key><arg_value>a b</arg_value>\
             <arg_key>count</arg_key><arg_value>5</arg_value></tool_call>"
                .into(),
        ),
        ("pythonic", "[f(text='a b', count=5)]".into()),
        ("olmo-3", "<function_calls>f(text=\"a b\", count=5)</function_calls>".into()),
        ("lfm2", "<|tool_call_start|>[f(text=\"a b\", count=5)]<|tool_call_end|>".into()),
        (
            "deepseek-v3",
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{json}\n\
                 ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
        ),
        (
            "deepseek-v3.1",
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{json}<｜tool▁call▁end｜>\
                 <｜tool▁calls▁end｜>"
            ),
        ),
        (
            "kimi",
            format!(
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0\
                 <|tool_call_argument_begin|>{json}<|tool_call_end|><|tool_calls_section_end|>"
            ),
        ),
        (
            "minimax",
            "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"text\">a b</parameter>\n\
             <parameter name=\"count\">5</parameter>\n</invoke>\n</minimax:tool_call>"
                .into(),
        ),
        (
            "deepseek-v3.2",
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"text\" \
             string=\"true\">a b</｜DSML｜parameter>\n<｜DSML｜parameter name=\"count\" \
             string=\"false\">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
                .into(),
        ),
        (
            "harmony",
            format!("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{json}<|call|>"),
        ),
        (
            "harmony",
            format!(" to=functions.f<|channel|>commentary json<|message|>{json}<|call|>"),
        ),
        (
            "seed-oss",
            "<seed:tool_call>\n<function=f>\n<parameter=text>a b</parameter>\n\
             <parameter=count>5</parameter>\n</function>\n</seed:tool_call>"
                .into(),
        ),
        ("apertus", format!("<|tools_prefix|>[{{\"f\": {json}}}]<|tools_suffix|>")),
        (
            "cohere",
            format!(
                "<|START_ACTION|>[\n    {{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": \
                 {json}}}\n]<|END_ACTION|>"
            ),
        ),
        ("nemotron-2", format!("<TOOLCALL>[{{\"name\": \"f\", \"arguments\": {json}}}]</TOOLCALL>")),
        ("hunyuan", format!("<tool_calls>[{{\"name\": \"f\", \"arguments\": {json}}}]</tool_calls>")),
        ("functools", format!("functools[{{\"name\": \"f\", \"arguments\": {json}}}]")),
        ("phi-4-mini", format!("<|tool_call|>[{{\"name\": \"f\", \"arguments\": {json}}}]<|/tool_call|>")),
        ("phi-4-mini", format!("<|tool_call|>{{\"name\": \"f\", \"arguments\": {json}}}<|/tool_call|>")),
        ("granite-3", format!("<|tool_call|>[{{\"arguments\": {json}, \"name\": \"f\"}}]")),
        ("gemma-4", "<|tool_call>call:f{text:<|\"|>a b<|\"|>,count:5}<tool_call|>".into()),
        (
            "function-gemma",
            "<start_function_call>call:f{text:<escape>a b<escape>,count:5}<end_function_call>"
                .into(),
        ),
    ] {
        check(name, &source, call);
    }
}

#[test]
fn the_chat_template_names_the_format() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/templates");
    for (file, name) in [
        ("Qwen-Qwen2.5-7B-Instruct.jinja", "hermes"),
        ("Qwen-Qwen3-0.6B.jinja", "hermes"),
        ("Qwen3.5-4B.jinja", "qwen"),
        ("meta-llama-Llama-3.1-8B-Instruct.jinja", "llama-3"),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja", "deepseek-v3"),
    ] {
        let template = std::fs::read_to_string(folder.join(file)).expect("a template");
        assert_eq!(Format::of(&template).name, name, "{file}");
    }
    for (template, name) in [
        ("", "hermes"),
        ("[TOOL_CALLS] [ARGS]", "mistral"),
        ("[TOOL_CALLS]", "mistral-list"),
        ("<tool_call> <arg_key>", "glm"),
        ("<|tool_call>", "gemma-4"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("｜DSML｜ function_calls", "deepseek-v3.2"),
        ("'<seed:tool_call>' <function=", "seed-oss"),
        ("<tool_call>\n<function=name>", "qwen"),
        ("'<|tools_prefix|>'", "apertus"),
        ("<|START_ACTION|>[", "cohere"),
        ("<TOOLCALL>[", "nemotron-2"),
        ("<tool_calls>[", "hunyuan"),
        ("functools[{", "functools"),
        ("<|tool|> <|/tool|>", "phi-4-mini"),
        // EXAONE 4.5 has the first of these as a role.
        ("'<|tool|>' \"<tool_call>\"", "hermes"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("List of tools: [", "lfm2"),
        ("<function_calls></function_calls>", "olmo-3"),
        ("<|tool_call|>[", "granite-3"),
        ("<tool_call>\n{\"name\": ", "hermes"),
        ("<|channel|> <|message|>", "harmony"),
    ] {
        assert_eq!(Format::of(template).name, name, "{template}");
    }
}

/// A template may show the tags of calls to nobody, while the vocabulary has them (fault F8).
#[test]
fn the_vocabulary_names_the_format_where_the_template_does_not() {
    for (tokens, name) in [
        (&["<|tool_call_start|>", "<|tool_call_end|>"][..], "lfm2"),
        (&["<|tool_call_start|>"], "hermes"),
        (&["<|tool_call|>", "<|/tool_call|>"], "phi-4-mini"),
        (&["<|python_tag|>"], "hermes"),
        // Qwen's vocabulary, and one in which a word is a tag.
        (&["<tool_call>", "</tool_call>"], "hermes"),
        (&["functools"], "hermes"),
        (&[], "hermes"),
    ] {
        let has_token = |tag: &str| tokens.contains(&tag);
        assert_eq!(Format::of_model("", has_token).name, name, "{tokens:?}");
        assert_eq!(Format::of_model("[TOOL_CALLS] [ARGS]", has_token).name, "mistral");
    }
}
