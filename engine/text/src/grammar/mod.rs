//! Grammars of structured replies: which tokens may come next.
//!
//! [`Grammars`] compiles the form that a request demands (a JSON schema, a regular expression, a list
//! of choices, a Lark grammar, tool calls) over the vocabulary of a model. A [`Grammar`] is the state of
//! one reply: it gives the mask of tokens that may follow, takes the committed ones, and goes back when
//! they are rewound.
//!
//! A form that cannot be enforced as a whole is refused, with the path of the keyword: no part of it is
//! dropped silently. What llguidance counts of its work has limits ([`limits`]), what it does not count is bounded
//! before ([`bounds`]), and forms are compiled on threads of their own ([`compile`]): a hostile form costs its
//! request, and at most some seconds of one core.
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

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, OnceLock};

use llguidance::api::{GrammarInit, GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{InferenceCapabilities, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Logger, Matcher, ParserFactory, TokenParser, panic_utils, regex_to_lark};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use self::bounds::Depth;
use self::calls::Calls;
use self::closed::closed;
use self::compile::{Compiler, FormDigest};
use self::watch::Watched;

use crate::Text;
use steersman_policy_host::{self as policy, AnswerForm};
use steersman_request::error::{RequestError, Result};
use steersman_request::{Form, Request, ResponseFormat};

mod bounds;
mod calls;
mod closed;
mod compile;
mod dead;
mod gbnf;
mod multiple;
mod parameter;
mod schema;
#[cfg(test)]
mod tests;
mod watch;

/// Most bytes of a schema, an expression, a grammar, or the texts of a choice.
const FORM_BYTES: usize = 256 << 10;

/// Most lexer fuel of one reply, in which each unit takes some 10 bytes of memory: generated forms spend up to a tenth.
const REPLY_FUEL: u64 = 40_000_000;

/// Fuel of building a lexer. A list of 30,000 values needs less than half.
const LEXER_FUEL: u64 = 200_000;

/// Most white space between two parts of a JSON text: without a limit, a model may write nothing else.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,64}";

/// Compiles the grammars of one model. The trie of its vocabulary is built for the first request that
/// needs it.
pub struct Grammars {
    text: Text,
    factory: OnceLock<Result<Arc<ParserFactory>, String>>,
    compiler: Compiler,
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
    digest: FormDigest,
    /// Where in the request its form stands, for errors.
    field: &'static str,
    /// What it takes in memory before its first token, about.
    bytes: usize,
    /// Lexer fuel of its masks so far.
    fuel: u64,
}

impl Grammars {
    /// The grammars of the model with this `text`.
    pub fn new(text: Text) -> Self {
        Self { text, factory: OnceLock::new(), compiler: Compiler::default() }
    }

    /// Whether the reply to `request` has a grammar, which takes time to compile.
    pub fn has_form(request: &Request) -> bool {
        let is_strict = |tool: &Value| {
            tool.get("function").unwrap_or(tool).get("strict") == Some(&Value::Bool(true))
        };
        let choice = &request.tool_choice;
        let has_calls = choice.is_required || choice.allowed.is_some();
        request.response_format.is_some() || has_calls || request.tools.iter().any(is_strict)
    }

    /// The grammar of a reply to `request`; `None` if its form is free.
    ///
    /// # Errors
    /// [`RequestError::Structure`] names what cannot be enforced.
    pub fn compile(&self, request: &Request) -> Result<Option<Grammar>, RequestError> {
        let format = request.response_format.clone();
        let calls = Calls::new(request, &self.text)?;
        if format.is_none() && calls.is_none() {
            return Ok(None);
        }
        let has_messages = self.text.call_format().has_messages();
        let is_required = request.tool_choice.is_required;
        let none = has_messages.then(|| Calls::none(&self.text));
        self.compile_form(Wanted { format, calls, is_required, none }).map(Some)
    }

    /// Checks that a form can be enforced.
    ///
    /// # Errors
    /// [`RequestError::Structure`] names what cannot be enforced.
    fn check(&self, format: ResponseFormat) -> Result<(), RequestError> {
        let wanted = Wanted { format: Some(format), calls: None, is_required: false, none: None };
        self.compile_form(wanted).map(drop)
    }

    /// Ends every wait for a compilation, with an error.
    pub fn end(&self) {
        self.compiler.end();
    }

    fn compile_form(&self, mut wanted: Wanted) -> Result<Grammar, RequestError> {
        let field = wanted.field();
        wanted.check_size()?;
        if let Some(calls) = &mut wanted.calls {
            calls.divide()?;
        }
        let digest = wanted.digest();
        if let Some(known) = self.compiler.recall(&digest) {
            return Ok(Grammar { field, ..known });
        }
        let factory = self.factory(field)?;
        let depth = wanted.depth();
        depth.check().map_err(|problem| refused(field, problem))?;
        let compiled = self.compiler.run(depth.stack(), move || wanted.compile(&factory, digest));
        let grammar = compiled.map_err(|problem| refused(field, problem))??;
        self.compiler.remember(digest, &grammar);
        Ok(grammar)
    }

    fn factory(&self, field: &str) -> Result<Arc<ParserFactory>, RequestError> {
        let factory = self.factory.get_or_init(|| {
            let start = std::time::Instant::now();
            let factory = factory(&self.text).map(Arc::new);
            tracing::debug!(elapsed = ?start.elapsed(), "vocabulary of grammars built");
            factory
        });
        factory.clone().map_err(|problem| refused(field, problem))
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
        self.check(format).map_err(|error| error.to_string())
    }
}

impl Grammar {
    /// The tokens that may come next: bit `id % 32` of word `id / 32`. End-of-turn tokens are among them
    /// where the form is complete.
    ///
    /// # Errors
    /// [`RequestError::Structure`] if the limits of a mask do not suffice.
    pub fn mask(&mut self) -> Result<Vec<u32>, RequestError> {
        let watched = self.watch();
        let mask = self.matcher.compute_mask_or_eos();
        drop(watched);
        let mask = mask.map_err(|error| self.too_complex(&error.to_string()))?;
        let spent = self.matcher.last_step_stats().map_or(0, |stats| stats.lexer_cost);
        self.fuel += spent;
        if self.fuel > REPLY_FUEL {
            return Err(self.too_complex("its terminals take too much memory"));
        }
        Ok(mask.as_slice().to_vec())
    }

    /// Adds a committed token. Returns false and changes nothing if it may not come next.
    ///
    /// # Errors
    /// As [`Grammar::mask`].
    pub fn commit(&mut self, token: u32) -> Result<bool, RequestError> {
        let watched = self.watch();
        let taken = self.matcher.try_consume_tokens(&[token]);
        drop(watched);
        Ok(taken.map_err(|error| self.too_complex(&error.to_string()))? == 1)
    }

    /// Takes back the newest `tokens` committed tokens.
    ///
    /// # Errors
    /// [`RequestError::Structure`] if so many have not been committed.
    pub fn rewind(&mut self, tokens: usize) -> Result<(), RequestError> {
        self.matcher.rollback(tokens).map_err(|error| self.too_complex(&error.to_string()))
    }

    /// Shares the lexer of `other` if both are of the same form: for choices, which run on one thread.
    pub fn share(&mut self, other: &Self) {
        if self.digest == other.digest {
            *self = other.clone();
        }
    }

    /// A copy that shares nothing that grows.
    fn with_own_lexer(&self) -> Self {
        Self { matcher: self.matcher.deep_clone(), ..self.clone() }
    }

    /// Ends what is done to the matcher if it takes too long, until the result is dropped.
    fn watch(&self) -> Option<Watched> {
        self.matcher.cancellation_handle().map(|handle| watch::watch(handle, watch::LIMIT))
    }

    fn too_complex(&self, problem: &str) -> RequestError {
        let problem = describe(first_line(problem));
        refused(self.field, format!("the form is too complex to enforce: {problem}"))
    }

    /// The tokens that must come next, in the spelling that the tokenizer gives their text. Each has a
    /// mask of one token, so they need not be sampled.
    pub fn forced(&mut self) -> Vec<u32> {
        let _watched = self.watch();
        self.matcher.compute_ff_tokens()
    }

    /// Whether the form is complete, whatever may follow.
    pub fn is_complete(&mut self) -> bool {
        self.matcher.is_accepting().unwrap_or(false)
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

/// The limits of one grammar. Lexer states take 1 to 2 KiB each; an item of an ambiguous grammar takes up to 10 us.
fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 30_000,
        step_max_items: 10_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// What the decode loop can do: it commits forced tokens.
fn capabilities() -> InferenceCapabilities {
    InferenceCapabilities { ff_tokens: true, ..Default::default() }
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
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    let env: llguidance::toktrie::TokEnv = vocabulary;
    let mut factory =
        ParserFactory::new(&env, capabilities(), &slices).map_err(|error| error.to_string())?;
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

/// Compiles a grammar, up to its first mask. Returns what it takes in memory, about.
fn matcher(factory: &ParserFactory, grammar: TopLevelGrammar) -> Result<(Matcher, usize), String> {
    let parser = AssertUnwindSafe(|| Ok(parser(factory, grammar)));
    let parser = panic_utils::catch_unwind(parser).map_err(|error| error.to_string());
    let parser = parser.flatten().map_err(|problem| describe(first_line(&problem)))?;
    let bytes = parser.parser.lexer_stats().num_bytes;
    let mut matcher = Matcher::new(Ok(parser)).into_cancellable();
    let watched = matcher.cancellation_handle().map(|handle| watch::watch(handle, watch::FIRST));
    // Compiled lazily: a form whose first mask is empty or too expensive is refused here.
    let mask = matcher.compute_mask_or_eos();
    mask.map_err(|error| describe(first_line(&error.to_string())))?;
    drop(watched);
    Ok((matcher, bytes))
}

fn parser(factory: &ParserFactory, grammar: TopLevelGrammar) -> Result<TokenParser, String> {
    let init = GrammarInit::Serialized(grammar);
    let compiled = init.to_internal(Some(factory.tok_env().clone()), factory.limits().clone());
    let (grammar, spec) = compiled.map_err(|error| error.to_string())?;
    bounds::check_terminals(&spec)?;
    let limits = ParserLimits { initial_lexer_fuel: LEXER_FUEL, ..factory.limits().clone() };
    let empty = bounds::empty_terminals(&spec, &limits)?;
    if !spec.can_rollback() {
        return Err(
            "`stop` and `max_tokens` of rules are not supported, as replies may be rewound; use \
                    `suffix`, or write the end as a part of the rule"
                .into(),
        );
    }
    let parser = factory.create_parser_from_init_ext(
        GrammarInit::Internal(grammar, spec),
        Logger::new(factory.buffer_log_level(), factory.stderr_log_level()),
        capabilities(),
        limits,
    );
    let parser = parser.map_err(|error| error.to_string())?;
    if dead::has_dead_end(parser.parser.grammar(), &empty) {
        return Err(
            "a part that must follow others matches no text, so that replies would be stuck \
                    before it"
                .into(),
        );
    }
    Ok(parser)
}

/// Compiles the grammar of `schema`.
fn try_schema(factory: &ParserFactory, schema: &Value) -> Result<(), String> {
    let grammar = TopLevelGrammar::from_grammar(json_grammar(schema.clone()));
    matcher(factory, grammar).map(drop)
}

/// What a reply must look like: the form of its answer, and its calls.
struct Wanted {
    format: Option<ResponseFormat>,
    calls: Option<Calls>,
    /// Whether the reply must contain a call.
    is_required: bool,
    /// No calls, if replies consist of messages.
    none: Option<Calls>,
}

impl Wanted {
    /// Where in the request it stands.
    fn field(&self) -> &'static str {
        self.format.as_ref().map_or("tools", |format| format.field)
    }

    /// Identifies it, whatever field it comes from.
    fn digest(&self) -> FormDigest {
        let form = self.format.as_ref().map(|format| &format.form);
        let calls =
            self.calls.as_ref().map(|calls| (calls.lark(Scope::Answer, false), calls.is_required));
        let schemas: Vec<_> =
            self.calls.iter().flat_map(Calls::schemas).map(Value::to_string).collect();
        let text =
            format!("{form:?} {calls:?} {schemas:?} {} {}", self.is_required, self.none.is_some());
        Sha256::digest(text).into()
    }

    /// How deep its compilation can recurse.
    fn depth(&self) -> Depth {
        let schemas = self.calls.iter().flat_map(Calls::schemas);
        let mut depth = schemas.map(Depth::of_schema).fold(Depth::default(), Depth::and);
        if let Some(calls) = &self.calls {
            let (lark, _) = bounds::schemas_in(&calls.lark(Scope::Answer, false));
            depth = depth.and(Depth::of_lark(&lark));
        }
        match self.format.as_ref().map(|format| &format.form) {
            Some(Form::JsonSchema(schema)) => depth.and(Depth::of_schema(schema)),
            Some(Form::Lark(text)) => {
                let (lark, schemas) = bounds::schemas_in(text);
                let schemas = schemas.iter().map(Depth::of_schema);
                schemas.fold(depth.and(Depth::of_lark(&lark)), Depth::and)
            }
            Some(Form::JsonObject | Form::Regex(_) | Form::Choice(_)) | None => depth,
        }
    }

    fn check_size(&self) -> Result<(), RequestError> {
        if let Some(calls) = &self.calls {
            calls.check_size()?;
        }
        let Some(ResponseFormat { field, form }) = &self.format else { return Ok(()) };
        let bytes = match form {
            Form::JsonObject => 0,
            Form::JsonSchema(schema) => schema.to_string().len(),
            Form::Regex(text) | Form::Lark(text) => text.len(),
            Form::Choice(texts) => texts.iter().map(String::len).sum(),
        };
        if bytes > FORM_BYTES {
            return Err(refused(field, format!("has {bytes} bytes, the limit is {FORM_BYTES}")));
        }
        if let Form::Choice(texts) = form
            && let Some(text) = texts.iter().find(|text| text.len() > bounds::TEXT_BYTES)
        {
            return Err(refused(field, bounds::text_too_long(text)));
        }
        Ok(())
    }

    /// Compiles it. A part is compiled on its own only to find what cannot be enforced.
    fn compile(self, factory: &ParserFactory, digest: FormDigest) -> Result<Grammar, RequestError> {
        let field = self.field();
        let Self { format, calls, is_required, none } = self;
        let check = |schema: &Value| try_schema(factory, schema);
        let answer = format.as_ref().filter(|_| !is_required);
        let form = answer.map(answer_grammar).transpose()?;
        if let Some(calls) = &calls {
            calls.check_bounds()?;
            if !calls.embed_schemas() {
                calls.check(&check)?;
            }
        }
        let must_call = calls.as_ref().is_some_and(|calls| calls.is_required);
        let scope = match &calls {
            _ if none.is_some() => Scope::Message { is_fixed: form.is_some() || must_call },
            Some(calls) if form.is_none() && !must_call => calls.lazy_scope(),
            _ => Scope::Answer,
        };
        let lark = match (&calls, &none) {
            (calls, Some(none)) => {
                Some(calls.as_ref().unwrap_or(none).lark_of_messages(form.is_some()))
            }
            (Some(calls), None) => Some(calls.lark(scope, form.is_some())),
            (None, None) => None,
        };
        let grammars = lark.into_iter().map(GrammarWithLexer::from_lark).chain(form.clone());
        let grammar = TopLevelGrammar { grammars: grammars.collect(), max_tokens: None };
        let (matcher, bytes) = match matcher(factory, grammar) {
            Ok(matcher) => matcher,
            Err(problem) => {
                if let Some(calls) = &calls {
                    calls.check(&check)?;
                }
                if let (Some(ResponseFormat { field, form: Form::JsonSchema(schema) }), true) =
                    (&format, form.is_some())
                {
                    schema::check(field, schema, &check)?;
                }
                return Err(refused(field, problem));
            }
        };
        Ok(Grammar { scope, matcher, digest, field, bytes, fuel: 0 })
    }
}

/// The grammar of an answer, after what llguidance does not count was checked.
fn answer_grammar(format: &ResponseFormat) -> Result<GrammarWithLexer, RequestError> {
    let ResponseFormat { field, form } = format;
    let lark = |text: String| named(GrammarWithLexer::from_lark(text), calls::ANSWER);
    Ok(match form {
        Form::JsonObject => named(json_grammar(json!({"type": "object"})), calls::ANSWER),
        Form::JsonSchema(schema) => {
            schema::check_bounds(field, schema)?;
            named(json_grammar(closed(schema)), calls::ANSWER)
        }
        Form::Regex(expression) => lark(format!("start: /{}/", regex_to_lark(expression, ""))),
        Form::Lark(text) if gbnf::is_gbnf(text) => {
            lark(gbnf::to_lark(text).map_err(|problem| refused(field, problem))?)
        }
        Form::Lark(text) => {
            for schema in bounds::schemas_in(text).1 {
                schema::check_bounds(field, &schema)?;
            }
            lark(text.clone())
        }
        Form::Choice(texts) => {
            lark(choice(texts).ok_or_else(|| refused(field, "has no choice; name at least one"))?)
        }
    })
}

/// One terminal: as rules of their own, thousands of texts would be as many items of the parser.
fn choice(texts: &[String]) -> Option<String> {
    let quoted = |texts: &[&String]| {
        let quoted: Vec<_> = texts.iter().map(|text| json!(text).to_string()).collect();
        quoted.join(" | ")
    };
    let (none, some): (Vec<_>, Vec<_>) = texts.iter().partition(|text| text.is_empty());
    match (&none[..], &some[..]) {
        ([], []) => None,
        (_, []) => Some("start: \"\"".into()),
        ([], some) => Some(format!("start: CHOICE\nCHOICE: {}", quoted(some))),
        (_, some) => Some(format!("start: CHOICE | \"\"\nCHOICE: {}", quoted(some))),
    }
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

/// Errors of llguidance go on with its state.
fn first_line(error: &str) -> &str {
    error.lines().next().unwrap_or_default()
}

/// llguidance's words for a limit, in ours.
fn describe(problem: &str) -> String {
    let is = |words: &str| problem.contains(words);
    if problem.starts_with("panic: ") {
        "llguidance fails at it (a bug); write it in another way".into()
    } else if is("cancelled") {
        format!("what may follow takes more than {} s to find", watch::LIMIT.as_secs())
    } else if is("fuel") || is("too many states") || is("too many expressions") {
        "it has too many states; use fewer or simpler expressions, repetitions and intersections"
            .into()
    } else if is("Current row has") || is("Too many items") {
        "it allows too many alternatives in one place; use fewer".into()
    } else if is("NoExtensionBias") {
        "no text is in this form: what must follow matches nothing, or never ends".into()
    } else {
        problem.into()
    }
}
