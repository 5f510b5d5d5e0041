//! Guests written as text: a core module, wrapped into a component as `wit-bindgen` wraps one.
//!
//! Names, signatures and layouts come from `wit/policy.wit`. A field or a hook that is added to the
//! contract needs no change here or in the tests.
//!
//! Panics if a text is not valid or a name is not part of the contract: a test that writes one is wrong.

use std::fmt::Write as _;
use std::sync::LazyLock;

use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::abi::{AbiVariant, FlatTypes, WasmType};
use wit_parser::{
    Function, Int, InterfaceId, LiftLowerAbi, ManglingAndAbi, PackageId, Resolve, SizeAlign, Type,
    TypeDefKind, WasmExport, WasmExportKind, WasmImport, WorldItem,
};

/// Address to which the host writes each argument, if the guest has the default `realloc`.
pub const HOST: u32 = 4096;

/// Address of the first answer of an [`Answers`], after the longest text that the host writes.
pub const ANSWER: u32 = 20 << 10;

/// Address of the first element of the first answer, if that is a list.
pub const ELEMENT: u32 = ANSWER + 8;

/// Names and signatures as `wit-component` expects them in a core module.
const NAMES: ManglingAndAbi = ManglingAndAbi::Legacy(LiftLowerAbi::Sync);

/// The realloc of a guest that need not hold its arguments. `(export "cabi_realloc")` in the text of a
/// guest replaces it.
const REALLOC: &str = r#"(func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
    i32.const 4096)"#;

struct Contract {
    resolve: Resolve,
    package: PackageId,
    sizes: SizeAlign,
}

static CONTRACT: LazyLock<Contract> = LazyLock::new(|| {
    let mut resolve = Resolve::default();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit");
    let (package, _) = resolve.push_dir(folder).expect("wit/ is valid");
    let mut sizes = SizeAlign::default();
    sizes.fill(&resolve).expect("all types have a size");
    Contract { resolve, package, sizes }
});

impl Contract {
    fn interface(&self, name: &str) -> InterfaceId {
        let interfaces = &self.resolve.packages[self.package].interfaces;
        *interfaces.get(name).unwrap_or_else(|| panic!("no interface `{name}`"))
    }

    fn hook(&self, name: &str) -> &Function {
        &self.resolve.interfaces[self.interface(name)].functions[name]
    }

    fn ty(&self, name: &str) -> Type {
        let types = &self.resolve.interfaces[self.interface("types")].types;
        Type::Id(*types.get(name).unwrap_or_else(|| panic!("no type `{name}`")))
    }

    /// The kind of a type, after its aliases are resolved; `None` for a scalar or text.
    fn kind(&self, ty: Type) -> Option<&TypeDefKind> {
        let Type::Id(id) = ty else { return None };
        match &self.resolve.types[id].kind {
            TypeDefKind::Type(alias) => self.kind(*alias),
            kind => Some(kind),
        }
    }

    /// Offset and type of a field of a record, or of the payload of an option, which is `some`.
    fn field(&self, ty: Type, name: &str) -> (u32, Type) {
        match self.kind(ty) {
            Some(TypeDefKind::Record(record)) => {
                let index = record.fields.iter().position(|field| field.name == name);
                let index = index.unwrap_or_else(|| panic!("no field `{name}`"));
                let types = record.fields.iter().map(|field| &field.ty);
                let (offset, ty) = self.sizes.field_offsets(types)[index];
                (offset.size_wasm32() as u32, *ty)
            }
            Some(TypeDefKind::Option(some)) if name == "some" => {
                (self.payload(Int::U8, [Some(some)]), *some)
            }
            _ => panic!("no field `{name}`"),
        }
    }

    fn payload<'a>(&self, tag: Int, cases: impl IntoIterator<Item = Option<&'a Type>>) -> u32 {
        self.sizes.payload_offset(tag, cases).size_wasm32() as u32
    }

    fn flat_words(&self, ty: &Type) -> usize {
        let mut storage = [WasmType::I32; 64];
        let mut flat = FlatTypes::new(&mut storage);
        assert!(self.resolve.push_flat(ty, &mut flat), "more than 64 words");
        flat.to_vec().len()
    }
}

/// Names of all hooks.
pub fn hooks() -> Vec<&'static str> {
    let packages = &CONTRACT.resolve.packages[CONTRACT.package];
    let exports = &CONTRACT.resolve.worlds[packages.worlds["policy-with-host"]].exports;
    let hook = |item: &'static WorldItem| match item {
        WorldItem::Interface { id, .. } => CONTRACT.resolve.interfaces[*id].name.as_deref(),
        _ => None,
    };
    exports.values().filter_map(hook).collect()
}

/// Full name of an interface of the contract, `steersman:policy/on-step@0.5.0`.
pub fn full_name(interface: &str) -> String {
    CONTRACT.resolve.id_of(CONTRACT.interface(interface)).expect("it has a name")
}

/// Offset of a field of a record, `("plan", "sampling.temperature.some")`; `some` is the payload of an
/// option.
pub fn offset(record: &str, path: &str) -> u32 {
    let (mut offset, mut ty) = (0, CONTRACT.ty(record));
    for name in path.split('.') {
        let (at, field) = CONTRACT.field(ty, name);
        (offset, ty) = (offset + at, field);
    }
    offset
}

/// Offset of the payload of a variant.
pub fn payload(variant: &str) -> u32 {
    let Some(TypeDefKind::Variant(cases)) = CONTRACT.kind(CONTRACT.ty(variant)) else {
        panic!("`{variant}` is not a variant")
    };
    CONTRACT.payload(cases.tag(), cases.cases.iter().map(|case| case.ty.as_ref()))
}

/// The WAT expression for a word of a field of the record that a hook is called with. Texts and lists
/// have two words, address and length.
pub fn input(hook: &str, field: &str, word: u32) -> String {
    let function = CONTRACT.hook(hook);
    let record = function.params[0].ty;
    if CONTRACT.resolve.wasm_signature(AbiVariant::GuestExport, function).indirect_params {
        let offset = CONTRACT.field(record, field).0 + 4 * word;
        return format!("(i32.load offset={offset} (local.get 0))");
    }
    let Some(TypeDefKind::Record(record)) = CONTRACT.kind(record) else {
        panic!("`{hook}` does not take a record")
    };
    let before = record.fields.iter().take_while(|other| other.name != field);
    let words: usize = before.map(|field| CONTRACT.flat_words(&field.ty)).sum();
    assert!(words < CONTRACT.flat_words(&function.params[0].ty), "no field `{field}`");
    format!("(local.get {})", words + word as usize)
}

/// A component with the given hooks: their names and the bodies of their functions in WAT. `extra` goes
/// into the core module. Its one page of memory is zero except for data in `extra`; the host writes
/// each argument to [`HOST`], over the one before.
pub fn component(hooks: &[(&str, &str)], extra: &str) -> Vec<u8> {
    importing(&[], hooks, extra)
}

/// [`component`] with imported interfaces. Bodies call their functions as `$kv.get`.
pub fn importing(interfaces: &[&str], hooks: &[(&str, &str)], extra: &str) -> Vec<u8> {
    encode("", interfaces, hooks, "", extra)
}

/// [`importing`] with `items` in the world of the component, and `imports` in the core module.
pub fn encode(
    items: &str,
    interfaces: &[&str],
    hooks: &[(&str, &str)],
    imports: &str,
    extra: &str,
) -> Vec<u8> {
    let mut world = format!("package test:guest; world guest {{ {items}");
    for interface in interfaces {
        let _ = write!(world, " import {};", full_name(interface));
    }
    for (hook, _) in hooks {
        let _ = write!(world, " export {};", full_name(hook));
    }
    world.push('}');
    let mut resolve = CONTRACT.resolve.clone();
    let package =
        resolve.push_str("guest.wit", &world).unwrap_or_else(|e| panic!("{e:?}: {world}"));
    let world = resolve.packages[package].worlds["guest"];

    let mut core = format!("(module {imports}");
    for (key, item) in &resolve.worlds[world].imports {
        let WorldItem::Interface { id, .. } = item else { continue };
        let interface = &resolve.interfaces[*id];
        let id = interface.name.as_deref().unwrap_or_default();
        for func in interface.functions.values() {
            let import = WasmImport::Func { interface: Some(key), func };
            let (module, name) = resolve.wasm_import_name(NAMES, import);
            let signature = signature(&resolve, AbiVariant::GuestImport, func);
            let _ = write!(
                core,
                "\n(import {module:?} {name:?} (func ${id}.{} {signature}))",
                func.name
            );
        }
    }
    let _ = write!(core, "\n(memory (export \"memory\") 1) {extra}");
    if !extra.contains("cabi_realloc") {
        core.push_str(REALLOC);
    }
    for (key, item) in &resolve.worlds[world].exports {
        let WorldItem::Interface { id, .. } = item else { continue };
        let interface = &resolve.interfaces[*id];
        let Some(&(_, body)) =
            hooks.iter().find(|(hook, _)| interface.name.as_deref() == Some(hook))
        else {
            continue;
        };
        for func in interface.functions.values() {
            let kind = WasmExportKind::Normal;
            let export = WasmExport::Func { interface: Some(key), func, kind };
            let name = resolve.wasm_export_name(NAMES, export);
            let signature = signature(&resolve, AbiVariant::GuestExport, func);
            let _ = write!(core, "\n(func (export {name:?}) {signature} {body})");
        }
    }
    core.push(')');

    let mut module = wat::parse_str(&core).unwrap_or_else(|error| panic!("{error}\n{core}"));
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8, false)
        .expect("the world can be encoded");
    ComponentEncoder::default()
        .module(&module)
        .and_then(|encoder| encoder.encode())
        .unwrap_or_else(|error| panic!("{error:?}\n{core}"))
}

fn signature(resolve: &Resolve, variant: AbiVariant, function: &Function) -> String {
    let signature = resolve.wasm_signature(variant, function);
    let mut text = String::new();
    for (keyword, types) in [("param", signature.params), ("result", signature.results)] {
        for ty in types {
            let ty = match ty {
                WasmType::I64 => "i64",
                WasmType::F32 => "f32",
                WasmType::F64 => "f64",
                _ => "i32",
            };
            let _ = write!(text, "({keyword} {ty})");
        }
    }
    text
}

/// `bytes` at an address, as an item of a core module.
pub fn data(address: u32, bytes: &[u8]) -> String {
    let text: String = bytes.iter().map(|byte| format!("\\{byte:02x}")).collect();
    format!(r#"(data (i32.const {address}) "{text}")"#)
}

/// Words as bytes of a guest's memory.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A value of a type of the contract.
#[derive(Clone)]
pub enum Value {
    /// The words in memory of any value, whether or not they are valid.
    Words(Vec<u32>),
    /// A text, whether or not it is UTF-8.
    Text(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// A tuple.
    Tuple(Vec<Value>),
    /// A record; fields that are not named are zero.
    Record(Vec<(&'static str, Value)>),
    /// A case of a variant or an enum.
    Case(&'static str, Box<Value>),
    /// An option that has a value.
    Some(Box<Value>),
}

/// A number, a flag, or nothing.
pub fn word(word: u32) -> Value {
    Value::Words(vec![word])
}

/// A fraction.
pub fn float(number: f32) -> Value {
    word(number.to_bits())
}

/// A text.
pub fn text(text: impl AsRef<[u8]>) -> Value {
    Value::Text(text.as_ref().to_vec())
}

/// A list.
pub fn list(elements: impl IntoIterator<Item = Value>) -> Value {
    Value::List(elements.into_iter().collect())
}

/// A tuple.
pub fn tuple(values: impl IntoIterator<Item = Value>) -> Value {
    Value::Tuple(values.into_iter().collect())
}

/// A record.
pub fn record(fields: impl IntoIterator<Item = (&'static str, Value)>) -> Value {
    Value::Record(fields.into_iter().collect())
}

/// A case of a variant or an enum; `word(0)` if it has no payload.
pub fn case(name: &'static str, payload: Value) -> Value {
    Value::Case(name, Box::new(payload))
}

/// An option that has a value.
pub fn some(value: Value) -> Value {
    Value::Some(Box::new(value))
}

/// Answers in the memory of a guest.
pub struct Answers {
    address: u32,
    bytes: Vec<u8>,
}

impl Default for Answers {
    fn default() -> Self {
        Self::at(ANSWER)
    }
}

impl Answers {
    /// Answers from this address on, a multiple of 8.
    pub fn at(address: u32) -> Self {
        Self { address, bytes: Vec::new() }
    }

    /// Adds an answer of a hook; returns its address, which the hook returns.
    pub fn add(&mut self, hook: &str, answer: &Value) -> u32 {
        let ty = CONTRACT.hook(hook).result.unwrap_or_else(|| panic!("{hook} returns nothing"));
        let at = self.allocate(&ty, 1);
        self.store(at, ty, answer);
        self.address + at
    }

    /// The answers, as an item of a core module.
    pub fn data(&self) -> String {
        data(self.address, &self.bytes)
    }

    /// The same as bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Offset of room for `count` values.
    fn allocate(&mut self, ty: &Type, count: usize) -> u32 {
        let at = self.bytes.len().next_multiple_of(CONTRACT.sizes.align(ty).align_wasm32());
        self.bytes.resize(at + count * CONTRACT.sizes.size(ty).size_wasm32(), 0);
        at as u32
    }

    fn write(&mut self, at: u32, bytes: &[u8]) {
        self.bytes[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    fn store(&mut self, at: u32, ty: Type, value: &Value) {
        let kind = CONTRACT.kind(ty);
        match (value, kind) {
            (Value::Words(value), _) => {
                let mut bytes = words(value);
                bytes.truncate(CONTRACT.sizes.size(&ty).size_wasm32());
                self.write(at, &bytes);
            }
            (Value::Text(bytes), None) => {
                let to = self.allocate(&Type::U8, bytes.len());
                self.write(to, bytes);
                self.write(at, &words(&[self.address + to, bytes.len() as u32]));
            }
            (Value::List(elements), Some(TypeDefKind::List(element))) => {
                let to = self.allocate(element, elements.len());
                let size = CONTRACT.sizes.size(element).size_wasm32() as u32;
                self.write(at, &words(&[self.address + to, elements.len() as u32]));
                for (to, value) in (to..).step_by(size as usize).zip(elements) {
                    self.store(to, *element, value);
                }
            }
            (Value::Tuple(values), Some(TypeDefKind::Tuple(tuple))) => {
                let fields = CONTRACT.sizes.field_offsets(&tuple.types);
                for (value, (offset, ty)) in values.iter().zip(fields) {
                    self.store(at + offset.size_wasm32() as u32, *ty, value);
                }
            }
            (Value::Record(fields), _) => {
                for (name, value) in fields {
                    let (offset, ty) = CONTRACT.field(ty, name);
                    self.store(at + offset, ty, value);
                }
            }
            (Value::Some(value), _) => {
                let (offset, ty) = CONTRACT.field(ty, "some");
                self.write(at, &[1]);
                self.store(at + offset, ty, value);
            }
            (Value::Case(name, _), Some(TypeDefKind::Enum(cases))) => {
                let index = cases.cases.iter().position(|case| case.name == *name);
                self.write(at, &[index.unwrap_or_else(|| panic!("no case `{name}`")) as u8]);
            }
            (Value::Case(name, value), Some(TypeDefKind::Variant(cases))) => {
                let index = cases.cases.iter().position(|case| case.name == *name);
                let index = index.unwrap_or_else(|| panic!("no case `{name}`"));
                self.write(at, &[index as u8]);
                let types = cases.cases.iter().map(|case| case.ty.as_ref());
                let offset = CONTRACT.payload(cases.tag(), types);
                if let Some(ty) = cases.cases[index].ty {
                    self.store(at + offset, ty, value);
                }
            }
            _ => panic!("a value does not fit its type {kind:?}"),
        }
    }
}

/// A component that exports one hook, which always returns `answer`.
pub fn answering(hook: &str, answer: &Value) -> Vec<u8> {
    let mut answers = Answers::default();
    let at = answers.add(hook, answer);
    component(&[(hook, &format!("i32.const {at}"))], &answers.data())
}

/// A component that retains state, by save point and seconds, and makes no other decision.
pub fn retaining(retentions: &[(&'static str, u32)]) -> Vec<u8> {
    let retention = |&(at, seconds): &(&'static str, u32)| {
        record([("at", case(at, word(0))), ("seconds", word(seconds))])
    };
    let retain = some(list(retentions.iter().map(retention)));
    answering("on-request", &record([("retain", retain)]))
}

/// A component that plans with its name as note, is called after every token, and stops its first step
/// with its name as reason, or traps.
pub fn named(name: &str, traps: bool) -> Vec<u8> {
    let mut answers = Answers::default();
    let plan = record([("every", word(1)), ("note", some(text(name)))]);
    let plan = answers.add("on-request", &plan);
    let stop = answers.add("on-step", &list([case("stop", text(name))]));
    let step = if traps { "unreachable".into() } else { format!("i32.const {stop}") };
    let hooks = [("on-request", &*format!("i32.const {plan}")), ("on-step", &step)];
    component(&hooks, &answers.data())
}

/// A component without its last byte. Half of one may be a valid component without hooks.
pub fn broken() -> Vec<u8> {
    let mut bytes = named("broken", false);
    bytes.pop();
    bytes
}

/// Replaces a file as editors do: renames another file over it.
///
/// # Panics
/// If it cannot be written.
pub fn replace(file: &std::path::Path, bytes: &[u8]) {
    let beside = file.with_extension("new");
    std::fs::write(&beside, bytes).unwrap();
    std::fs::rename(&beside, file).unwrap();
}
