//! The table of formats; see [`Format`].

use super::super::harmony;
use super::reader::Dialect;
use super::{Arguments, Format, Ids, Text, Written, blocks, json, literals};

const GEMMA_QUOTE: &str = "<|\"|>";

const fn parameters(
    key: [&'static str; 2],
    text: Text,
    close: &'static str,
    separator: &'static str,
) -> Arguments {
    Arguments::Parameters { key, text, close, separator }
}

/// What a row has where it says nothing else: no tags, and calls in JSON.
const ROW: Format = Format {
    name: "",
    signs: &[],
    open: None,
    close: None,
    inner: &[],
    bare: None,
    untagged: None,
    ids: Ids::Call,
    dialect: Dialect::Json,
    read: json::objects,
    written: WRITTEN,
};

/// How a row writes calls where it says nothing else: as objects with the keys `name` and `arguments`.
const WRITTEN: Written = Written {
    section: ["", ""],
    call: ["{\"name\": \"", "\", \"arguments\": ", "}"],
    is_numbered: false,
    between: "",
    arguments: Arguments::Json,
};

/// A format of one list of objects with the keys `name` and `arguments`.
const fn list(
    name: &'static str,
    signs: &'static [&'static [&'static str]],
    open: &'static str,
    close: Option<&'static str>,
    section: [&'static str; 2],
) -> Format {
    Format {
        name,
        signs,
        open: Some(open),
        close,
        written: Written { section, between: ", ", ..WRITTEN },
        ..ROW
    }
}

/// The formats. The first whose signs a template has is its format; the last is that of templates and
/// vocabularies that have none.
pub static FORMATS: &[Format] = &[
    Format {
        name: "harmony",
        signs: &[&["<|channel|>", "<|message|>"]],
        inner: harmony::TAGS,
        read: json::harmony,
        written: Written {
            call: [harmony::CALL_HEADER, " <|constrain|>json<|message|>", ""],
            between: "<|end|>",
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "kimi",
        signs: &[&["<|tool_calls_section_begin|>"]],
        open: Some("<|tool_calls_section_begin|>"),
        close: Some("<|tool_calls_section_end|>"),
        inner: &["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
        untagged: Some("<|tool_call_begin|>"),
        ids: Ids::Function,
        read: json::kimi,
        written: Written {
            section: ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
            call: [
                "<|tool_call_begin|>functions.",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
            ],
            is_numbered: true,
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "minimax",
        signs: &[&["<minimax:tool_call>"]],
        open: Some("<minimax:tool_call>"),
        close: Some("</minimax:tool_call>"),
        untagged: Some("<invoke name=\""),
        read: blocks::minimax,
        written: Written {
            section: ["<minimax:tool_call>\n", "</minimax:tool_call>"],
            call: ["<invoke name=\"", "\">\n", "</invoke>\n"],
            arguments: parameters(["<parameter name=\"", "\">"], Text::Bare, "</parameter>\n", ""),
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "deepseek-v3",
        signs: &[&["<｜tool▁calls▁begin｜>", "```json"]],
        open: Some("<｜tool▁calls▁begin｜>"),
        close: Some("<｜tool▁calls▁end｜>"),
        inner: &["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
        untagged: Some("<｜tool▁call▁begin｜>"),
        read: json::deepseek,
        written: Written {
            section: ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
            call: [
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                "\n```json\n",
                "\n```<｜tool▁call▁end｜>",
            ],
            between: "\n",
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "deepseek-v3.1",
        signs: &[&["<｜tool▁calls▁begin｜>"]],
        open: Some("<｜tool▁calls▁begin｜>"),
        close: Some("<｜tool▁calls▁end｜>"),
        inner: &["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
        untagged: Some("<｜tool▁call▁begin｜>"),
        read: json::deepseek,
        written: Written {
            section: ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
            call: ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "deepseek-v3.2",
        signs: &[&["｜DSML｜", "function_calls"]],
        open: Some("<｜DSML｜function_calls>"),
        close: Some("</｜DSML｜function_calls>"),
        inner: &["｜DSML｜"],
        untagged: Some("<｜DSML｜invoke name=\""),
        read: blocks::deepseek,
        written: Written {
            section: ["<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"],
            call: ["<｜DSML｜invoke name=\"", "\">\n", "</｜DSML｜invoke>\n"],
            arguments: parameters(
                ["<｜DSML｜parameter name=\"", "\" string=\"true\">"],
                Text::Declared("\" string=\"false\">"),
                "</｜DSML｜parameter>\n",
                "",
            ),
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "gemma-4",
        signs: &[&["<|tool_call>"]],
        open: Some("<|tool_call>"),
        close: Some("<tool_call|>"),
        inner: &[GEMMA_QUOTE],
        dialect: Dialect::Quoted(GEMMA_QUOTE),
        read: literals::gemma,
        written: Written {
            call: ["<|tool_call>call:", "{", "}<tool_call|>"],
            arguments: parameters(["", ":"], Text::Quoted(GEMMA_QUOTE), "", ","),
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "function-gemma",
        signs: &[&["<start_function_call>"]],
        open: Some("<start_function_call>"),
        close: Some("<end_function_call>"),
        inner: &["<escape>"],
        dialect: Dialect::Quoted("<escape>"),
        read: literals::gemma,
        written: Written {
            call: ["<start_function_call>call:", "{", "}<end_function_call>"],
            arguments: parameters(["", ":"], Text::Quoted("<escape>"), "", ","),
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "mistral",
        signs: &[&["[TOOL_CALLS]", "[ARGS]"]],
        open: Some("[TOOL_CALLS]"),
        inner: &["[CALL_ID]", "[ARGS]"],
        ids: Ids::Nine,
        read: json::mistral,
        written: Written { call: ["[TOOL_CALLS]", "[ARGS]", ""], ..WRITTEN },
        ..ROW
    },
    Format {
        name: "mistral-list",
        signs: &[&["[TOOL_CALLS]"]],
        open: Some("[TOOL_CALLS]"),
        inner: &["[CALL_ID]", "[ARGS]"],
        ids: Ids::Nine,
        read: json::mistral,
        written: Written { section: ["[TOOL_CALLS][", "]"], between: ", ", ..WRITTEN },
        ..ROW
    },
    Format {
        name: "glm",
        signs: &[&["<tool_call>", "<arg_key>"]],
        open: Some("<tool_call>"),
        close: Some("</tool_call>"),
        inner: &["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        read: blocks::glm,
        written: Written {
            call: ["<tool_call>", "\n", "</tool_call>"],
            between: "\n",
            arguments: parameters(
                ["<arg_key>", "</arg_key>\n<arg_value>"],
                Text::Bare,
                "</arg_value>\n",
                "",
            ),
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "lfm2",
        // Some templates show the tags to nobody: the vocabulary has them.
        signs: &[&["<|tool_call_start|>"], &["<|tool_list_start|>"], &["List of tools: ["]],
        open: Some("<|tool_call_start|>"),
        close: Some("<|tool_call_end|>"),
        dialect: Dialect::Python,
        read: literals::pythonic,
        written: Written { section: ["<|tool_call_start|>[", "]<|tool_call_end|>"], ..PYTHONIC },
        ..ROW
    },
    Format {
        name: "seed-oss",
        signs: &[&["<seed:tool_call>"]],
        open: Some("<seed:tool_call>"),
        close: Some("</seed:tool_call>"),
        untagged: Some("<function="),
        read: blocks::seed,
        written: Written {
            call: ["<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>"],
            between: "\n",
            arguments: parameters(["<parameter=", ">"], Text::Bare, "</parameter>\n", ""),
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "qwen",
        signs: &[&["<function="]],
        open: Some("<tool_call>"),
        close: Some("</tool_call>"),
        untagged: Some("<function="),
        read: blocks::qwen,
        written: Written {
            call: ["<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"],
            between: "\n",
            arguments: parameters(["<parameter=", ">\n"], Text::Bare, "\n</parameter>\n", ""),
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "apertus",
        signs: &[&["<|tools_prefix|>"]],
        open: Some("<|tools_prefix|>"),
        close: Some("<|tools_suffix|>"),
        read: json::named,
        written: Written {
            section: ["<|tools_prefix|>[", "]<|tools_suffix|>"],
            call: ["{\"", "\": ", "}"],
            between: ", ",
            ..WRITTEN
        },
        ..ROW
    },
    // Ids of calls, which their results refer to, are numbers that the template makes.
    Format {
        name: "cohere",
        signs: &[&["<|START_ACTION|>"]],
        open: Some("<|START_ACTION|>"),
        close: Some("<|END_ACTION|>"),
        written: Written {
            section: ["<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"],
            call: ["{\"tool_name\": \"", "\", \"parameters\": ", "}"],
            between: ",\n    ",
            ..WRITTEN
        },
        ..ROW
    },
    // Nemotron Nano 2, and Llama Nemotron.
    list(
        "nemotron-2",
        &[&["<TOOLCALL>"]],
        "<TOOLCALL>",
        Some("</TOOLCALL>"),
        ["<TOOLCALL>[", "]</TOOLCALL>"],
    ),
    list(
        "hunyuan",
        &[&["<tool_calls>"]],
        "<tool_calls>",
        Some("</tool_calls>"),
        ["<tool_calls>[", "]</tool_calls>"],
    ),
    // Templates of Phi-4-mini describe calls in one of two ways.
    list("functools", &[&["functools["]], "functools", None, ["functools[", "]"]),
    list(
        "phi-4-mini",
        &[&["<|tool_call|>", "<|/tool_call|>"], &["<|tool|>", "<|/tool|>"]],
        "<|tool_call|>",
        Some("<|/tool_call|>"),
        ["<|tool_call|>[", "]<|/tool_call|>"],
    ),
    list("granite-3", &[&["<|tool_call|>"]], "<|tool_call|>", None, ["<|tool_call|>[", "]"]),
    Format {
        name: "llama-3",
        signs: &[&["<|start_header_id|>", "\"parameters\": "]],
        open: Some("<|python_tag|>"),
        bare: Some('{'),
        written: Written {
            call: ["{\"name\": \"", "\", \"parameters\": ", "}"],
            between: "; ",
            ..WRITTEN
        },
        ..ROW
    },
    Format {
        name: "pythonic",
        signs: &[&["[func_name1("], &["<|python_start|>"]],
        open: Some("<|python_start|>"),
        close: Some("<|python_end|>"),
        bare: Some('['),
        dialect: Dialect::Python,
        read: literals::pythonic,
        written: PYTHONIC,
        ..ROW
    },
    Format {
        name: "olmo-3",
        signs: &[&["<function_calls>"]],
        open: Some("<function_calls>"),
        close: Some("</function_calls>"),
        dialect: Dialect::Python,
        read: literals::pythonic,
        written: Written {
            section: ["<function_calls>", "</function_calls>"],
            between: "\n",
            ..PYTHONIC
        },
        ..ROW
    },
    Format {
        name: "hermes",
        signs: &[&["<tool_call>"]],
        open: Some("<tool_call>"),
        close: Some("</tool_call>"),
        read: blocks::qwen,
        written: Written {
            call: ["<tool_call>\n{\"name\": \"", "\", \"arguments\": ", "}\n</tool_call>"],
            between: "\n",
            ..WRITTEN
        },
        ..ROW
    },
];

const PYTHONIC: Written = Written {
    section: ["[", "]"],
    call: ["", "(", ")"],
    is_numbered: false,
    between: ", ",
    arguments: parameters(["", "="], Text::Json, "", ", "),
};
