//! Grammars of structured replies: which tokens may come next.
//!
//! [`Grammars`] compiles the form that a request demands (a JSON schema, a regular expression, a list
//! of choices, a Lark grammar, tool calls) over the vocabulary of a model. A [`Grammar`] is the state of
//! one reply: it gives the mask of tokens that may follow, takes the committed ones, and goes back when
//! they are rewound.
//!
//! A form that cannot be enforced as a whole is refused, with the path of the keyword: no part of it is
//! dropped silently. Compiling and masking have limits ([`limits`]), so a hostile schema costs
//! milliseconds and not the process.
//!
//! Tokens that carry structure (end of turn, `<think>`, `<tool_call>`) are not text, and no form contains
//! them, except that calls begin and end with theirs. End-of-turn tokens are allowed where the form is
//! complete.
//!
//! Knows neither arrays nor HTTP, and never samples.
//!
//! # Why llguidance
//! It computes masks from an Earley parser over derivatives of regular expressions, in microseconds and
//! without a table that grows with the schema. It names what it does not support, where others ignore
//! it. Source: llguidance 1.9 (MIT), <https://github.com/guidance-ai/llguidance>.

use std::sync::{Arc, OnceLock};

use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory, regex_to_lark};
use serde_json::{Value, json};

use crate::error::{RequestError, Result};
use crate::policy::{self, AnswerForm};
use crate::request::{Form, Request, ResponseFormat};
use crate::text::Text;

mod calls;
mod gbnf;
mod schema;
#[cfg(test)]
mod tests;

/// Most bytes of a schema, an expression, a grammar, or the texts of a choice.
const FORM_BYTES: usize = 256 << 10;

/// Most white space between two parts of a JSON text: without a limit, a model may write nothing else.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,64}";

/// Compiles the grammars of one model. The trie of its vocabulary is built for the first request that
/// needs it.
pub struct Grammars {
    text: Text,
    factory: OnceLock<Result<ParserFactory, String>>,
}

/// Where in a reply a grammar begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Where the answer begins; it covers the rest of the reply.
    Answer,
    /// Where the answer begins, until it is certain that it is no call: for models that write calls
    /// without a tag.
    Opening,
    /// After each tag that opens a tool call; it covers the call with its closing tag.
    Call,
    /// Where each message begins, in replies that consist of messages; it covers the header and the body of
    /// a call.
    Message {
        /// Whether it covers the body of the answer too, or the reply must have a call.
        is_fixed: bool,
    },
}

/// The grammar of a reply, after some of its tokens.
#[derive(Clone)]
pub struct Grammar {
    /// Where it begins.
    pub scope: Scope,
    matcher: Matcher,
}

impl Grammars {
    /// Of the model with this `text`.
    pub fn new(text: Text) -> Self {
        Self { text, factory: OnceLock::new() }
    }

    /// The grammar of a reply to `request`; `None` if its form is free.
    ///
    /// # Errors
    /// [`RequestError::Structure`] names what cannot be enforced.
    pub fn compile(&self, request: &Request) -> Result<Option<Grammar>, RequestError> {
        let format = request.response_format.as_ref();
        let calls = calls::Calls::new(request, &self.text)?;
        if format.is_none() && calls.is_none() {
            return Ok(None);
        }
        let factory = self.factory()?;
        if let Some(calls) = &calls {
            calls.check(&|schema| try_schema(factory, schema))?;
        }
        let answer = match format {
            Some(format) if !request.tool_choice.is_required => Some(answer(factory, format)?),
            _ => None,
        };
        let scope = match &calls {
            _ if self.text.call_format().has_messages() => {
                let is_required = calls.as_ref().is_some_and(|calls| calls.is_required);
                Scope::Message { is_fixed: answer.is_some() || is_required }
            }
            Some(calls) if answer.is_none() && !calls.is_required => calls.lazy_scope(),
            _ => Scope::Answer,
        };
        let named_answer = |grammar: &mut TopLevelGrammar, answer: Option<GrammarWithLexer>| {
            grammar.grammars.extend(answer.map(|part| named(part, calls::ANSWER)));
        };
        let grammar = match (answer, calls) {
            (answer, calls) if matches!(scope, Scope::Message { .. }) => {
                let calls = calls.unwrap_or_else(|| calls::Calls::none(&self.text));
                let lark = calls.lark_of_messages(answer.is_some());
                let mut grammar = TopLevelGrammar::from_lark(lark);
                named_answer(&mut grammar, answer);
                grammar
            }
            (Some(answer), None) => TopLevelGrammar::from_grammar(answer),
            (answer, Some(calls)) => {
                let lark = calls.lark(scope, answer.is_some());
                let mut grammar = TopLevelGrammar::from_lark(lark);
                named_answer(&mut grammar, answer);
                grammar
            }
            (None, None) => return Ok(None),
        };
        let path = format.map_or("tools", |format| format.field);
        let matcher = matcher(factory, grammar).map_err(|problem| refused(path, problem))?;
        Ok(Some(Grammar { scope, matcher }))
    }

    /// Checks that a form can be enforced.
    ///
    /// # Errors
    /// [`RequestError::Structure`] names what cannot be enforced.
    fn check(&self, format: &ResponseFormat) -> Result<(), RequestError> {
        answer(self.factory()?, format).map(|_| ())
    }

    fn factory(&self) -> Result<&ParserFactory, RequestError> {
        let factory = self.factory.get_or_init(|| {
            let start = std::time::Instant::now();
            let factory = factory(&self.text);
            tracing::info!(elapsed = ?start.elapsed(), "vocabulary of grammars built");
            factory
        });
        factory.as_ref().map_err(|problem| refused("response_format", problem))
    }
}

impl policy::Vocabulary for Grammars {
    fn encode(&self, text: &str) -> Option<Vec<u32>> {
        self.text.encode_plain(text).ok()
    }

    fn decode(&self, tokens: &[u32]) -> String {
        self.text.decode(tokens)
    }

    fn size(&self) -> u32 {
        u32::try_from(self.text.vocab_size()).unwrap_or(u32::MAX)
    }

    fn check_form(&self, form: &AnswerForm) -> Result<(), String> {
        let format = ResponseFormat::planned(form.clone())?;
        self.check(&format).map_err(|error| error.to_string())
    }
}

impl Grammar {
    /// The tokens that may come next: bit `id % 32` of word `id / 32`. End-of-turn tokens are among them
    /// where the form is complete.
    ///
    /// # Errors
    /// [`RequestError::Structure`] if the limits of a mask do not suffice.
    pub fn mask(&mut self) -> Result<Vec<u32>, RequestError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(too_complex)?;
        Ok(mask.as_slice().to_vec())
    }

    /// Adds a committed token. Returns false and changes nothing if it may not come next.
    ///
    /// # Errors
    /// As [`Grammar::mask`].
    pub fn commit(&mut self, token: u32) -> Result<bool, RequestError> {
        Ok(self.matcher.try_consume_tokens(&[token]).map_err(too_complex)? == 1)
    }

    /// Takes back the newest `tokens` committed tokens.
    ///
    /// # Errors
    /// [`RequestError::Structure`] if so many have not been committed.
    pub fn rewind(&mut self, tokens: usize) -> Result<(), RequestError> {
        self.matcher.rollback(tokens).map_err(too_complex)
    }

    /// The tokens that must come next, in the spelling that the tokenizer gives their text. Each has a
    /// mask of one token, so they need not be sampled.
    pub fn forced(&mut self) -> Vec<u32> {
        self.matcher.compute_ff_tokens()
    }

    /// Whether the form is complete and nothing can follow.
    pub fn has_ended(&self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").field("scope", &self.scope).finish_non_exhaustive()
    }
}

/// The limits of one grammar. Lexer states take 1 to 2 KiB each.
fn limits() -> ParserLimits {
    ParserLimits { max_lexer_states: 30_000, verbose_errors: false, ..ParserLimits::default() }
}

/// The vocabulary of `text` as llguidance wants it.
struct Vocabulary {
    text: Text,
    trie: TokTrie,
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| match self.text.encode_plain(text) {
            Ok(tokens) => tokens,
            Err(_) => self.trie.greedy_tokenize(text.as_bytes()),
        })
    }
}

fn factory(text: &Text) -> Result<ParserFactory, String> {
    let words: Vec<Vec<u8>> = text.token_bytes().into_iter().enumerate().map(word).collect();
    let eos: Vec<u32> =
        text.eos().iter().copied().filter(|id| (*id as usize) < words.len()).collect();
    let Some(first) = eos.first() else {
        return Err("the model has no end-of-turn token in its vocabulary".into());
    };
    let size = u32::try_from(words.len()).map_err(|_| "the vocabulary is too large")?;
    let trie = TokTrie::from(&TokRxInfo::new(size, *first), &words).with_eos_tokens(&eos);
    let vocabulary = Arc::new(Vocabulary { text: text.clone(), trie });
    let capabilities = InferenceCapabilities { ff_tokens: true, ..Default::default() };
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    let env: llguidance::toktrie::TokEnv = vocabulary;
    let mut factory =
        ParserFactory::new(&env, capabilities, &slices).map_err(|error| error.to_string())?;
    factory.quiet();
    *factory.limits_mut() = limits();
    Ok(factory)
}

/// The bytes of a token; those without text get a spelling that no text has.
fn word((id, bytes): (usize, Option<Vec<u8>>)) -> Vec<u8> {
    bytes.unwrap_or_else(|| {
        let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
        word.extend(format!("<{id}>").bytes());
        word
    })
}

fn matcher(factory: &ParserFactory, grammar: TopLevelGrammar) -> Result<Matcher, String> {
    let mut matcher = Matcher::new(factory.create_parser(grammar));
    if let Some(error) = matcher.get_error() {
        return Err(first_line(&error));
    }
    // Compiled lazily: a form whose first mask is empty or too expensive is refused here.
    matcher.compute_mask_or_eos().map_err(|error| first_line(&error.to_string()))?;
    Ok(matcher)
}

/// Compiles the grammar of `schema`.
fn try_schema(factory: &ParserFactory, schema: &Value) -> Result<(), String> {
    let grammar = TopLevelGrammar::from_grammar(json_grammar(schema.clone()));
    matcher(factory, grammar).map(drop)
}

/// The grammar of an answer.
fn answer(
    factory: &ParserFactory,
    format: &ResponseFormat,
) -> Result<GrammarWithLexer, RequestError> {
    let field = format.field;
    check_size(field, format)?;
    let lark = |text: String| named(GrammarWithLexer::from_lark(text), calls::ANSWER);
    let grammar = match &format.form {
        Form::JsonObject => json_grammar(json!({"type": "object"})),
        Form::JsonSchema(schema) => {
            schema::check(field, schema, &|schema| try_schema(factory, schema))?;
            return Ok(json_grammar(schema.clone()));
        }
        Form::Regex(expression) => lark(format!("start: /{}/", regex_to_lark(expression, ""))),
        Form::Lark(text) if gbnf::is_gbnf(text) => {
            lark(gbnf::to_lark(text).map_err(|problem| refused(field, problem))?)
        }
        Form::Lark(text) => lark(text.clone()),
        Form::Choice(texts) if texts.is_empty() => {
            return Err(refused(field, "has no choice; name at least one"));
        }
        Form::Choice(texts) => {
            let quoted: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            lark(format!("start: {}", quoted.join(" | ")))
        }
    };
    matcher(factory, TopLevelGrammar::from_grammar(grammar.clone()))
        .map_err(|problem| refused(field, problem))?;
    Ok(grammar)
}

fn check_size(field: &str, format: &ResponseFormat) -> Result<(), RequestError> {
    let bytes = match &format.form {
        Form::JsonObject => 0,
        Form::JsonSchema(schema) => schema.to_string().len(),
        Form::Regex(text) | Form::Lark(text) => text.len(),
        Form::Choice(texts) => texts.iter().map(String::len).sum(),
    };
    if bytes > FORM_BYTES {
        return Err(refused(field, format!("has {bytes} bytes, the limit is {FORM_BYTES}")));
    }
    Ok(())
}

/// The grammar of JSON texts that `schema` accepts.
fn json_grammar(schema: Value) -> GrammarWithLexer {
    GrammarWithLexer::from_json_schema(with_options(schema))
}

/// `schema` with llguidance's options. What the client wrote under their name is dropped.
fn with_options(mut schema: Value) -> Value {
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    schema::complete_formats(&mut schema);
    if let Some(keywords) = schema.as_object_mut() {
        keywords.insert("x-guidance".into(), json!({"whitespace_pattern": WHITE_SPACE}));
    }
    schema
}

fn named(grammar: GrammarWithLexer, name: &str) -> GrammarWithLexer {
    GrammarWithLexer { name: Some(name.into()), ..grammar }
}

fn refused(path: &str, problem: impl Into<String>) -> RequestError {
    RequestError::Structure { path: path.into(), problem: problem.into() }
}

fn too_complex(error: impl std::fmt::Display) -> RequestError {
    let problem = first_line(&error.to_string());
    refused("response_format", format!("the form is too complex to enforce: {problem}"))
}

/// Errors of llguidance go on with its state.
fn first_line(error: &str) -> String {
    error.lines().next().unwrap_or_default().to_string()
}
