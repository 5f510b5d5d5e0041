//! Bounds of a form's work that are checked before llguidance sees the form, or before it tests its terminals.
//!
//! llguidance counts its work (fuel, Earley items, states), and [`super::limits`] ends what is counted. What
//! it does not count is bounded here, so that every compilation and every mask ends:
//!
//! - **The stack.** It recurses along references, rules, brackets and properties. [`Depth`] bounds the levels
//!   of a form without recursion of its own; the thread of the compilation has a stack for as many.
//! - **Intersections.** `allOf` of patterns, `&` and `~` of Lark. Whether an intersection is empty is tested when a
//!   form is compiled, and again in each transition of its lexer while a reply is written. The fuel is looked
//!   at between two states only, and one state of an intersection is the product of the first bytes of
//!   its parts: measured, each further `(a|b)*a(a|b){5}` makes a state 3.6 times as expensive, so that 14 of
//!   them run for minutes within one state. The number of different sets that contain the same byte bounds
//!   this product ([`Sets::product_bits`]); [`PRODUCT_BITS`] is the largest that is enforced.
//!   What stays too expensive for its fuel, as long repetitions of `.` within repetitions, is ended by
//!   [`super::watch`] in masks, and by the deadline of [`super::compile`] before.
//! - **Multiples.** See [`super::multiple`].
//! - **Pairs.** The options of `oneOf`, and the patterns of `patternProperties`, are compared in pairs.
//!
//! # Why not a child process
//! It would bound a compilation, as it does for components, but not the masks, which are computed for each
//! token on the engine's thread; and each would have to build the vocabulary first.

use std::collections::{BTreeMap, HashMap, HashSet};

use llguidance::api::ParserLimits;
use llguidance::derivre::raw::{ExprSet, RelevanceCache};
use llguidance::derivre::{ExprRef, RegexBuilder};
use llguidance::earley::lexerspec::{LexemeIdx, LexerSpec};
use llguidance::regex_to_lark;
use serde_json::{Map, Value};

use super::multiple::Multiples;

/// Most levels of a form: references, rules and brackets that may be nested in one another.
const LEVELS: usize = 8192;

/// Stack of a level. Measured: 10 KiB for references, 3 KiB for rules, with llguidance optimised.
const LEVEL_STACK: usize = 16 << 10;

/// Stack of a value of a schema: properties of an object nest while it is compiled.
const VALUE_STACK: usize = 2 << 10;

/// Stack of the smallest form.
const LEAST_STACK: usize = 4 << 20;

/// Binary logarithm of the most pairs of first bytes and rests in one state of an intersection.
pub(super) const PRODUCT_BITS: f64 = 20.0;

/// The same for the patterns of a JSON string, before they are quoted, which adds sets of its own.
const PATTERN_BITS: f64 = 16.0;

/// The most such pairs of all intersections of a form together.
const PRODUCTS: f64 = (1u64 << 22) as f64;

/// The most pairs within lists of `oneOf` and within `patternProperties`.
const PAIRS: usize = 1 << 20;

/// How many pairs of options cost as much as one pair of patterns, whose intersection is tested.
const PATTERN_PAIR: usize = 512;

/// The most properties of all objects, times those of the largest: which of them may be left out is found out in as
/// many steps. Measured: 9,000 in one object take 55 s, 1,000 less than one.
const PROPERTY_STEPS: usize = 1_500_000;

/// The most bytes of a text that the answer may have to consist of: it is tokenized as a whole.
pub const TEXT_BYTES: usize = 16 << 10;

/// Steps of the checks of one form.
const STEPS: usize = 4_000_000;

/// Fuel of the test whether one intersection is empty: a hundred times what common ones need. Long repetitions of `.`
/// within repetitions take a second for each 6,000.
const INTERSECTION_FUEL: u64 = 30_000;

/// What the expression of a limited length counts for.
const LENGTH_BITS: f64 = 3.0;

/// What the patterns count for that stand behind a `format`, of which each string has one.
const FORMAT_BITS: f64 = 6.0;

/// Tags of expressions in derivre, which does not export their type.
mod tag {
    pub const BYTE: u8 = 3;
    pub const BYTE_SET: u8 = 4;
    pub const BYTE_CONCAT: u8 = 5;
    pub const NOT: u8 = 8;
    pub const AND: u8 = 12;
}

/// What is too large, and the path of the keyword in its schema.
#[derive(Debug, PartialEq, Eq)]
pub struct Excess {
    pub place: String,
    pub problem: String,
}

fn excess<T>(place: &str, problem: impl Into<String>) -> Result<T, Excess> {
    Err(Excess { place: place.into(), problem: problem.into() })
}

/// How deep the compilation of a form can recurse.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Depth {
    levels: usize,
    values: usize,
}

impl Depth {
    /// The depth of a JSON schema. Each definition is entered once at most while another is compiled.
    pub fn of_schema(schema: &Value) -> Self {
        let (mut deepest, mut containers, mut values) = (0, 0, 0);
        let mut targets = HashSet::new();
        let mut todo = vec![(schema, 1)];
        while let Some((value, depth)) = todo.pop() {
            values += 1;
            match value {
                Value::Object(parts) => {
                    targets.extend(parts.get("$ref").and_then(Value::as_str));
                    todo.extend(parts.values().map(|part| (part, depth + 1)));
                }
                Value::Array(parts) => todo.extend(parts.iter().map(|part| (part, depth + 1))),
                _ => continue,
            }
            containers += 1;
            deepest = deepest.max(depth);
        }
        Self { levels: containers.min(deepest * (1 + targets.len())), values }
    }

    /// The depth of a Lark grammar, without the schemas in it: each level has a bracket or a colon.
    pub fn of_lark(text: &str) -> Self {
        let is_level = |byte: &u8| matches!(byte, b':' | b'(' | b'[' | b'{');
        Self { levels: text.bytes().filter(|byte| is_level(byte)).count(), values: 0 }
    }

    /// The depth of both, one within the other.
    pub fn and(self, other: Self) -> Self {
        Self { levels: self.levels + other.levels, values: self.values + other.values }
    }

    /// Checks that there are at most [`LEVELS`].
    pub fn check(self) -> Result<(), String> {
        let Self { levels, .. } = self;
        if levels <= LEVELS {
            return Ok(());
        }
        Err(format!(
            "has {levels} levels of references, rules and brackets that may be nested, the limit is {LEVELS}; \
             write fewer of them"
        ))
    }

    /// The stack that its compilation needs, in bytes.
    pub fn stack(self) -> usize {
        LEAST_STACK + self.levels * LEVEL_STACK + self.values * VALUE_STACK
    }
}

/// The schemas within a Lark grammar, and the grammar without them.
pub fn schemas_in(lark: &str) -> (String, Vec<Value>) {
    let (mut rest, mut around, mut schemas) = (lark, String::new(), Vec::new());
    while let Some(at) = rest.find("%json") {
        let (before, after) = rest.split_at(at + "%json".len());
        around.push_str(before);
        rest = after;
        let mut values = serde_json::Deserializer::from_str(after).into_iter::<Value>();
        if let Some(Ok(schema)) = values.next() {
            rest = &after[values.byte_offset()..];
            schemas.push(schema);
        }
    }
    around.push_str(rest);
    (around, schemas)
}

/// Checks what llguidance does not count in a schema. Recurses as deep as [`Depth::stack`] is enough for.
///
/// # Errors
/// The first keyword that is too large.
pub fn check_schema(schema: &Value) -> Result<(), Excess> {
    let mut check = SchemaCheck {
        root: schema,
        definitions: HashMap::new(),
        patterns: HashMap::new(),
        steps: 0,
        pairs: 0,
        products: 0.0,
        properties: 0,
        largest: 0,
    };
    check.strings(schema, "").map(drop)
}

/// What is intersected for the strings and numbers in one place, as far as it is known.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    bits: f64,
    count: usize,
    /// Whether the length is limited. Several limits become one.
    has_length: bool,
    multiples: Multiples,
}

impl Part {
    fn or(self, other: Self) -> Self {
        Self {
            bits: self.bits.max(other.bits),
            count: self.count.max(other.count),
            has_length: self.has_length || other.has_length,
            multiples: self.multiples.or(other.multiples),
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            bits: self.bits + other.bits,
            count: self.count + other.count,
            has_length: self.has_length || other.has_length,
            multiples: self.multiples.and(other.multiples),
        }
    }

    /// The bits of the intersection; 0 if there is nothing to intersect.
    fn product_bits(self) -> f64 {
        match self.count + usize::from(self.has_length) {
            0 | 1 => 0.0,
            _ if self.has_length => self.bits + LENGTH_BITS,
            _ => self.bits,
        }
    }
}

/// The strings and numbers in a schema that are intersected, by the last step that leads to them: the schema
/// itself, a property, any property, an item. Those in different places may share a step, never the other way
/// round.
type Strings = BTreeMap<Step, Part>;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Itself,
    Property(String),
    AnyProperty,
    Item,
}

struct SchemaCheck<'a> {
    root: &'a Value,
    /// By reference; `None` while it is being entered.
    definitions: HashMap<&'a str, Option<Strings>>,
    patterns: HashMap<&'a str, f64>,
    steps: usize,
    pairs: usize,
    products: f64,
    properties: usize,
    /// Most properties of one object.
    largest: usize,
}

impl<'a> SchemaCheck<'a> {
    /// The strings of `schema`, which stands at `place`.
    fn strings(&mut self, schema: &'a Value, place: &str) -> Result<Strings, Excess> {
        let mut all = Strings::new();
        let Value::Object(keywords) = schema else { return Ok(all) };
        self.step(1, place)?;
        let text = |key: &str| keywords.get(key).and_then(Value::as_str);
        self.texts(keywords, place)?;
        self.properties(keywords, place)?;
        let has_length = ["minLength", "maxLength"].iter().any(|key| keywords.contains_key(*key));
        let mut own = Part { has_length, ..Part::default() };
        if let Some(pattern) = text("pattern") {
            let bits = self.pattern(pattern);
            own = own.and(Part { bits, count: 1, ..Part::default() });
        }
        if text("format").is_some() {
            own = own.and(Part { bits: FORMAT_BITS, count: 1, ..Part::default() });
        }
        if let Some(number) = keywords.get("multipleOf").and_then(Value::as_f64) {
            let one = Multiples::one(number);
            own.multiples =
                one.or_else(|problem| excess(&format!("{place}.multipleOf"), problem))?;
        }
        if own.count > 0 || has_length || own.multiples.count > 0 {
            all.insert(Step::Itself, own);
        }
        // Parts of the schema's own: one string is in one of them.
        let mut parts = Strings::new();
        for (key, step) in [
            ("properties", None),
            ("patternProperties", Some(Step::AnyProperty)),
            ("$defs", Some(Step::Itself)),
            ("definitions", Some(Step::Itself)),
        ] {
            let Some(named) = keywords.get(key).and_then(Value::as_object) else { continue };
            if key == "patternProperties" {
                let pairs = named.len() * named.len() / 2 * PATTERN_PAIR;
                self.pairs(pairs, &format!("{place}.{key}"))?;
            }
            for (name, part) in named {
                let inner = self.strings(part, &format!("{place}.{key}.{name}"))?;
                // A definition counts where it is referred to.
                if step != Some(Step::Itself) {
                    let step = step.clone().unwrap_or_else(|| Step::Property(name.clone()));
                    self.place(inner, step, &mut parts, place)?;
                }
            }
        }
        for (key, step) in [
            ("additionalProperties", Step::AnyProperty),
            ("items", Step::Item),
            ("additionalItems", Step::Item),
            ("prefixItems", Step::Item),
        ] {
            let Some(value) = keywords.get(key) else { continue };
            let lists = value.as_array().map_or_else(|| std::slice::from_ref(value), Vec::as_slice);
            for (i, part) in lists.iter().enumerate() {
                let at = if value.is_array() {
                    format!("{place}.{key}[{i}]")
                } else {
                    format!("{place}.{key}")
                };
                let inner = self.strings(part, &at)?;
                self.place(inner, step.clone(), &mut parts, place)?;
            }
        }
        self.intersect(&mut all, parts, place)?;
        for key in ["anyOf", "oneOf", "allOf"] {
            let Some(list) = keywords.get(key).and_then(Value::as_array) else { continue };
            let place = format!("{place}.{key}");
            if key == "oneOf" {
                let size = list.iter().map(|option| option.as_object().map_or(1, |o| 1 + o.len()));
                self.pairs(list.len() * size.sum::<usize>() / 2, &place)?;
            }
            let mut options = Strings::new();
            for (i, part) in list.iter().enumerate() {
                let inner = self.strings(part, &format!("{place}[{i}]"))?;
                if key == "allOf" {
                    self.intersect(&mut all, inner, &place)?;
                } else {
                    self.merge(&mut options, inner, Part::or, &place)?;
                }
            }
            self.intersect(&mut all, options, &place)?;
        }
        if let Some(target) = text("$ref") {
            let inner = self.definition(target, place)?;
            self.intersect(&mut all, inner, &format!("{place}.$ref"))?;
        }
        if own.count > 0 {
            // Each string's own test.
            let bits = all.get(&Step::Itself).map_or(0.0, |part| part.product_bits());
            self.products += bits.exp2();
            if self.products > PRODUCTS {
                return excess(
                    place,
                    "has too many strings whose patterns are intersected; use fewer",
                );
            }
        }
        Ok(all)
    }

    /// Checks the texts that a value may have to be.
    fn texts(&self, keywords: &Map<String, Value>, place: &str) -> Result<(), Excess> {
        let values = |key: &str| keywords.get(key).map(std::slice::from_ref);
        let list = keywords.get("enum").and_then(Value::as_array).map(Vec::as_slice);
        for (key, values) in [("const", values("const")), ("enum", list)] {
            let mut texts = values.unwrap_or_default().iter().filter_map(Value::as_str);
            if let Some(text) = texts.find(|text| text.len() > TEXT_BYTES) {
                return excess(&format!("{place}.{key}"), text_too_long(text));
            }
        }
        Ok(())
    }

    /// Counts what may be left out of an object or a list.
    fn properties(&mut self, keywords: &Map<String, Value>, place: &str) -> Result<(), Excess> {
        for key in ["properties", "required", "prefixItems"] {
            let Some(value) = keywords.get(key) else { continue };
            let count =
                value.as_object().map_or(0, Map::len) + value.as_array().map_or(0, Vec::len);
            self.properties += count;
            self.largest = self.largest.max(count);
            if self.properties * self.largest > PROPERTY_STEPS {
                let problem =
                    format!("has too many properties: {count} here, {} in all", self.properties);
                return excess(&format!("{place}.{key}"), problem);
            }
        }
        Ok(())
    }

    fn definition(&mut self, target: &'a str, place: &str) -> Result<Strings, Excess> {
        if let Some(known) = self.definitions.get(target) {
            return Ok(known.clone().unwrap_or_default());
        }
        let Some(pointer) = target.strip_prefix('#') else { return Ok(Strings::new()) };
        let Some(found) = self.root.pointer(pointer) else { return Ok(Strings::new()) };
        self.definitions.insert(target, None);
        let strings = self.strings(found, &pointer.replace('/', "."))?;
        self.step(strings.len(), place)?;
        self.definitions.insert(target, Some(strings.clone()));
        Ok(strings)
    }

    /// Adds the strings of a part behind `step`.
    fn place(
        &mut self,
        inner: Strings,
        step: Step,
        all: &mut Strings,
        at: &str,
    ) -> Result<(), Excess> {
        let moved = inner.into_iter().map(|(own, part)| match own {
            Step::Itself => (step.clone(), part),
            own => (own, part),
        });
        let moved: Vec<_> = moved.collect();
        for (step, part) in moved {
            self.step(1, at)?;
            let known = all.entry(step).or_default();
            *known = known.or(part);
        }
        Ok(())
    }

    /// Adds the strings of a schema that applies beside the others.
    fn intersect(&mut self, all: &mut Strings, other: Strings, at: &str) -> Result<(), Excess> {
        if other.is_empty() {
            return Ok(());
        }
        self.merge(all, other, Part::and, at)?;
        let any = all.get(&Step::AnyProperty).copied().unwrap_or_default();
        for (step, part) in &*all {
            let part = if matches!(step, Step::Property(_)) { part.and(any) } else { *part };
            if part.product_bits() > PATTERN_BITS {
                return excess(at, TOO_MANY);
            }
            part.multiples.check().or_else(|problem| excess(at, problem))?;
        }
        Ok(())
    }

    fn merge(
        &mut self,
        all: &mut Strings,
        other: Strings,
        join: fn(Part, Part) -> Part,
        at: &str,
    ) -> Result<(), Excess> {
        self.step(all.len() + other.len(), at)?;
        for (step, part) in other {
            let known = all.entry(step).or_default();
            *known = join(*known, part);
        }
        Ok(())
    }

    fn pattern(&mut self, pattern: &'a str) -> f64 {
        if let Some(bits) = self.patterns.get(pattern) {
            return *bits;
        }
        let mut builder = RegexBuilder::new();
        let parsed = builder.mk_regex_for_serach(&regex_to_lark(pattern, "dw"));
        // An expression that cannot be parsed is refused by llguidance, which says why.
        let bits = parsed.map_or(0.0, |expression| {
            Sets::of(builder.exprset(), expression, &HashMap::new(), &mut 0).bits()
        });
        self.patterns.insert(pattern, bits);
        bits
    }

    fn pairs(&mut self, pairs: usize, place: &str) -> Result<(), Excess> {
        self.pairs += pairs;
        if self.pairs > PAIRS {
            return excess(
                place,
                "has too many parts that must be compared with one another; use fewer",
            );
        }
        Ok(())
    }

    fn step(&mut self, steps: usize, place: &str) -> Result<(), Excess> {
        self.steps += steps;
        if self.steps > STEPS {
            return excess(place, "this schema has too many parts that are combined; use fewer");
        }
        Ok(())
    }
}

/// The problem of a text of more than [`TEXT_BYTES`].
pub fn text_too_long(text: &str) -> String {
    format!("has a text of {} bytes, the limit is {TEXT_BYTES}", text.len())
}

const TOO_MANY: &str = "the patterns that apply to one string together are too many or too complex to be \
                        intersected; write them as one pattern, or use fewer";

/// By byte, the number of different sets in an expression that contain it.
struct Sets {
    counts: [f64; 256],
    nodes: usize,
}

impl Sets {
    /// The sets in `root`. What stands in an intersection counts as in `intersections`.
    fn of(
        exprs: &ExprSet,
        root: ExprRef,
        intersections: &HashMap<u32, [f64; 256]>,
        steps: &mut usize,
    ) -> Self {
        let mut sets = Self { counts: [0.0; 256], nodes: 0 };
        let (mut seen, mut todo) = (HashSet::new(), vec![root]);
        while let Some(e) = todo.pop() {
            if !seen.insert(e.as_u32()) {
                continue;
            }
            sets.nodes += 1;
            *steps += 1;
            match exprs.get_tag(e) as u8 {
                tag::BYTE | tag::BYTE_SET | tag::BYTE_CONCAT => {
                    let first = exprs.get(e);
                    for byte in 0..=255u8 {
                        if !first.surely_no_match(byte) {
                            sets.counts[usize::from(byte)] += 1.0;
                        }
                    }
                    todo.extend_from_slice(exprs.get_args(e));
                }
                // The first bytes of a complement are disjoint.
                tag::NOT => sets.counts.iter_mut().for_each(|count| *count += 1.0),
                tag::AND => {
                    if let Some(inner) = intersections.get(&e.as_u32()) {
                        let both = sets.counts.iter_mut().zip(inner);
                        both.for_each(|(count, bits)| *count += bits + 1.0);
                    }
                }
                _ => todo.extend_from_slice(exprs.get_args(e)),
            }
        }
        sets
    }

    /// By byte, the binary logarithm of the number of first sets that contain it. These are unions of the
    /// sets of the expression, and there are no more of them than parts.
    fn product_bits(&self) -> [f64; 256] {
        let most = (self.nodes as f64).log2();
        self.counts
            .map(|count| if count < 1.0 { 0.0 } else { (count.exp2() - 1.0).log2().min(most) })
    }

    fn bits(&self) -> f64 {
        self.product_bits().into_iter().fold(0.0, f64::max)
    }
}

/// Checks the terminals of a compiled form before llguidance tests them, and tests each intersection with little fuel.
///
/// # Errors
/// What is too large.
pub fn check_terminals(spec: &LexerSpec) -> Result<(), String> {
    let exprs = spec.regex_builder.exprset();
    check_products(exprs)?;
    let is_intersection = |e: &ExprRef| exprs.get_tag(*e) as u8 == tag::AND;
    let all: Vec<_> = (1..exprs.len() as u32).map(ExprRef::new).filter(is_intersection).collect();
    if all.is_empty() {
        return Ok(());
    }
    let (mut exprs, mut tests) = (exprs.clone(), RelevanceCache::new());
    let is_within =
        |e: ExprRef| tests.is_non_empty_limited(&mut exprs, e, INTERSECTION_FUEL).is_ok();
    if all.into_iter().all(is_within) { Ok(()) } else { Err(TOO_MANY.into()) }
}

/// Bounds the pairs of first bytes and rests in one state of each intersection.
fn check_products(exprs: &ExprSet) -> Result<(), String> {
    let (mut steps, mut products) = (0, 0.0);
    let mut intersections: HashMap<u32, [f64; 256]> = HashMap::new();
    // The parts of an expression are older than itself.
    for id in 1..exprs.len() as u32 {
        let e = ExprRef::new(id);
        match exprs.get_tag(e) as u8 {
            tag::AND => {
                let mut product = [0.0; 256];
                for &part in exprs.get_args(e) {
                    let bits = Sets::of(exprs, part, &intersections, &mut steps).product_bits();
                    product.iter_mut().zip(bits).for_each(|(sum, bits)| *sum += bits);
                }
                let largest = product.iter().copied().fold(0.0, f64::max);
                products += largest.exp2();
                if largest > PRODUCT_BITS || products > PRODUCTS {
                    return Err(TOO_MANY.into());
                }
                intersections.insert(id, product);
            }
            // Its first bytes are made disjoint, pair by pair.
            tag::NOT => {
                let Some(&part) = exprs.get_args(e).first() else { continue };
                let sets = Sets::of(exprs, part, &intersections, &mut steps);
                products += sets.bits().exp2();
                if sets.bits() > PRODUCT_BITS / 2.0 || products > PRODUCTS {
                    return Err(TOO_MANY.into());
                }
            }
            _ => {}
        }
        if steps > STEPS {
            return Err("this form has too many terminals that are intersected; use fewer".into());
        }
    }
    Ok(())
}

/// The terminals of `spec` that match no text, by index.
///
/// # Errors
/// If this cannot be found out within the fuel of a form.
pub fn empty_terminals(spec: &LexerSpec, limits: &ParserLimits) -> Result<HashSet<usize>, String> {
    let lexer = spec.to_regex_vec(&mut limits.clone());
    let mut lexer = lexer.map_err(|error| error.to_string())?;
    let is_empty = |index: &usize| {
        let mut one = spec.alloc_lexeme_set();
        one.add(LexemeIdx::new(*index));
        lexer.initial_state(&one).is_dead()
    };
    Ok((0..spec.lexemes.len()).filter(is_empty).collect())
}
