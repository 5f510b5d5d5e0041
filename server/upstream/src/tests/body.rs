//! What the upstream is asked for.

use steersman_policy_host::{SamplingPatch, TokenBias};
use steersman_request::{
    Effort, Embedding, Form, FunctionCall, Penalties, RawPrompt, ResponseFormat, ToolCall,
    ToolChoice,
};

use super::*;
use crate::Kind;

/// The body that an upstream of this kind gets.
async fn body(kind: Kind, request: Request) -> Value {
    let upstream = Scripted::start(vec![says("x")]).await;
    let model = model(&upstream.url, |config| config.capabilities.kind = Some(kind));
    model.check(&request).unwrap();
    all(begin(&model, request)).await;
    upstream.body(0)
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
}

#[tokio::test]
async fn everything_that_a_client_asks_for_is_passed_on() {
    let call = ToolCall {
        id: "call_1".into(),
        kind: "function".into(),
        function: FunctionCall {
            name: "look".into(),
            arguments: steersman_request::Arguments::parse("{\"n\": 12345678901234567890123}")
                .unwrap(),
        },
    };
    let message = |role: &str, content: &str| Message {
        role: role.into(),
        content: content.into(),
        ..Message::default()
    };
    let request = Request {
        messages: vec![
            message("developer", "Be brief."),
            message("user", "Look."),
            Message {
                tool_calls: vec![call],
                reasoning_content: Some("I look.".into()),
                ..message("assistant", "")
            },
            Message { tool_call_id: Some("call_1".into()), ..message("tool", "found") },
        ],
        tools: vec![tool("look"), tool("find")],
        tool_choice: ToolChoice { is_required: true, is_single: true, ..ToolChoice::default() },
        max_tokens: Some(100),
        sampling: SamplingPatch {
            temperature: Some(0.7),
            top_p: Some(0.9),
            top_k: Some(20),
            min_p: Some(0.05),
        },
        biases: vec![TokenBias { token: 7, bias: -100.0 }],
        penalties: Penalties { presence: 0.5, frequency: 0.25, repetition: 1.1, window: 0 },
        seed: Some(7),
        stop: vec!["END".into()],
        min_tokens: 3,
        logprobs: Some(2),
        reasoning: Some(true),
        reasoning_budget: Some(64),
        template_variables: json!({"tone": "dry"}).as_object().unwrap().clone(),
        ..ask("")
    };
    let sent = body(Kind::Vllm, request).await;
    let call = json!({"id": "call_1", "type": "function",
        "function": {"name": "look", "arguments": "{\"n\":12345678901234567890123}"}});
    let expected = json!({
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": null, "tool_calls": [call], "reasoning_content": "I look."},
            {"role": "tool", "content": "found", "tool_call_id": "call_1"},
        ],
        "stream": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        "max_tokens": 100,
        "tools": [tool("look"), tool("find")],
        "tool_choice": "required",
        "parallel_tool_calls": false,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
        "logit_bias": {"7": -100.0},
        "logprobs": true,
        "top_logprobs": 2,
        "seed": 7,
        "stop": ["END"],
        "thinking_token_budget": 64,
        "chat_template_kwargs": {"tone": "dry", "enable_thinking": true},
    });
    assert_eq!(sent, expected);
}

#[tokio::test]
async fn forms_are_passed_on_in_the_fields_of_each_server() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let asked = |form: Form| Request {
        response_format: Some(ResponseFormat { field: "response_format", form }),
        ..ask("?")
    };
    let strict = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": true}});
    for kind in [Kind::OpenAi, Kind::Vllm, Kind::LlamaCpp, Kind::Steersman] {
        let sent = body(kind, asked(Form::JsonSchema(schema.clone()))).await;
        assert_eq!(sent["response_format"], strict, "{kind:?}");
    }
    let regex = || asked(Form::Regex("[a-z]+".into()));
    assert_eq!(body(Kind::Vllm, regex()).await["structured_outputs"], json!({"regex": "[a-z]+"}));
    assert_eq!(body(Kind::Sglang, regex()).await["regex"], "[a-z]+");
    let grammar = || asked(Form::Lark("root ::= \"x\"".into()));
    assert_eq!(body(Kind::LlamaCpp, grammar()).await["grammar"], "root ::= \"x\"");
}

#[tokio::test]
async fn vendors_are_told_to_reason_in_their_field() {
    let asked = |reasoning, effort| Request { reasoning, effort, ..ask("?") };
    for (request, expected) in [
        (asked(None, None), Value::Null),
        (asked(Some(false), None), json!("none")),
        (asked(Some(true), Some(Effort::Low)), json!("low")),
        (asked(Some(true), Some(Effort::Max)), json!("xhigh")),
        (asked(Some(true), None), json!("high")),
        (Request { reasoning_budget: Some(500), ..asked(Some(true), None) }, json!("low")),
    ] {
        let sent = body(Kind::OpenAi, request).await;
        assert_eq!(sent["reasoning_effort"], expected);
        assert_eq!(sent["chat_template_kwargs"], Value::Null);
    }
    let sent = body(Kind::OpenAi, Request { max_answer_tokens: Some(9), ..ask("?") }).await;
    assert_eq!((&sent["max_completion_tokens"], &sent["max_tokens"]), (&json!(9), &Value::Null));
}

#[tokio::test]
async fn what_an_upstream_lacks_is_refused_by_name() {
    let vendor = model("http://127.0.0.1:1", |_| ());
    let form = |form| Some(ResponseFormat { field: "guided_regex", form });
    let cases: Vec<(Request, &str)> = vec![
        (
            Request {
                sampling: SamplingPatch { top_k: Some(5), ..SamplingPatch::default() },
                ..ask("?")
            },
            "top_k: ",
        ),
        (Request { min_tokens: 5, ..ask("?") }, "min_tokens: "),
        (Request { ignores_end: true, ..ask("?") }, "ignore_eos: "),
        (Request { prompt: Some(RawPrompt::Text("x".into())), ..ask("?") }, "prompt: "),
        (Request { embedding: Some(Embedding::default()), ..ask("?") }, "input: "),
        (Request { prompt_logprobs: Some(1), ..ask("?") }, "prompt_logprobs: "),
        (Request { response_format: form(Form::Regex("x".into())), ..ask("?") }, "guided_regex: "),
        (Request { messages: Vec::new(), ..ask("?") }, "the prompt is empty"),
    ];
    for (request, words) in cases {
        let error = vendor.submit(request).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
        assert!(
            words.len() > 20 || words == "the prompt is empty" || error.contains("`work`"),
            "{error}"
        );
    }
}

/// mlx_lm.server ignores `tool_choice`, and its streams have no probabilities: a demand for a call was lost in silence,
/// and so were the probabilities.
#[tokio::test]
async fn what_mlx_lm_ignores_is_refused_or_left_out() {
    let mlx_lm = |url: &str| model(url, |config| config.capabilities.kind = Some(Kind::MlxLm));
    let tools = || Request { tools: vec![tool("look")], ..ask("?") };
    let choice = ToolChoice { is_required: true, ..ToolChoice::default() };
    for (request, field) in [
        (Request { tool_choice: choice, ..tools() }, "tool_choice: "),
        (Request { logprobs: Some(2), ..ask("?") }, "logprobs: "),
    ] {
        let error = mlx_lm("http://127.0.0.1:1").submit(request).unwrap_err().to_string();
        assert!(error.starts_with(field), "{error}");
    }
    let none = ToolChoice { allowed: Some(Vec::new()), ..ToolChoice::default() };
    let request = Request { tool_choice: none, ..tools() };
    let sent = body(Kind::MlxLm, request.clone()).await;
    assert_eq!((&sent["tools"], &sent["tool_choice"]), (&Value::Null, &Value::Null));
    let sent = body(Kind::Vllm, request).await;
    assert_eq!((&sent["tools"], &sent["tool_choice"]), (&json!([tool("look")]), &json!("none")));
}

/// llama.cpp took a named tool for `auto`, and answered instead of calling it; its field for budgets was not known.
#[tokio::test]
async fn llama_cpp_is_told_which_tool_to_call_and_how_long_to_reason() {
    let choice = ToolChoice {
        is_required: true,
        allowed: Some(vec!["look".into()]),
        ..ToolChoice::default()
    };
    let request = Request {
        tools: vec![tool("look"), tool("find")],
        tool_choice: choice,
        reasoning: Some(true),
        reasoning_budget: Some(64),
        ..ask("?")
    };
    let sent = body(Kind::LlamaCpp, request.clone()).await;
    assert_eq!(
        (&sent["tools"], &sent["tool_choice"]),
        (&json!([tool("look")]), &json!("required"))
    );
    assert_eq!(sent["thinking_budget_tokens"], 64);
    let sent = body(Kind::Vllm, request).await;
    let named = json!({"type": "function", "function": {"name": "look"}});
    assert_eq!((&sent["tools"], &sent["tool_choice"]), (&json!([tool("look")]), &named));
}

#[tokio::test]
async fn an_upstream_is_asked_for_its_models_and_its_kind() {
    let models = json!({"data": [
        {"id": "owner/m", "owned_by": "vllm", "max_model_len": 40960},
        {"id": "b", "owned_by": "vllm"},
    ]});
    let upstream = Scripted::with_models(models, vec![says("x")]).await;
    let model = model(&upstream.url, |_| ());
    assert_eq!(model.capabilities().kind, Kind::OpenAi);
    assert_eq!(model.upstream().ask().await.unwrap(), ["b", "owner/m"]);
    assert_eq!(model.capabilities().kind, Kind::Vllm);
    assert_eq!(model.upstream().model("owner/m").context(), Some(40960));
    assert_eq!(model.upstream().model("owner/m").model(), "owner/m");
}

/// An upstream that was started after this server was taken for one that has OpenAI's fields only, until a restart.
#[tokio::test]
async fn an_upstream_that_was_away_is_asked_again() {
    let upstream = Scripted::with_models(json!("starting"), vec![says("x")]).await;
    let model = model(&upstream.url, |_| ());
    assert!(model.upstream().ask().await.is_err());
    assert!(model.upstream().known_capabilities().is_none());
    upstream.list(json!({"data": [{"id": "m", "owned_by": "vllm"}]}));
    let at = &model.upstream().shared().ask_again_at;
    assert!(at.lock().is_some());
    *at.lock() = Some(tokio::time::Instant::now());
    model.check(&ask("?")).unwrap();
    let known = async {
        while model.upstream().known_capabilities().is_none() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), known).await.unwrap();
    assert_eq!(model.capabilities().kind, Kind::Vllm);
}
