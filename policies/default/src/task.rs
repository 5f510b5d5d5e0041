//! The kind of answer that a user message asks for, so that the hint after closed reasoning fits.
//!
//! A wrong kind is worse than none: "**Final Code:**" misleads after a question about code, while
//! "**Final Answer:**" always fits. So a kind needs an instruction: a sentence that begins with a verb
//! of making, changing, extracting or replying, with a noun as its object. The first such sentence
//! decides, since pasted text follows its instruction; but "Answer in JSON." wins at any position.
//! Questions and text inside ``` fences have no kind.

/// The kind of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// JSON.
    Json,
    /// Code, with the language name that follows ```; empty if unknown.
    Code(&'static str),
    /// An SQL statement.
    Sql,
    /// A text in another language.
    Translation,
    /// A table in Markdown.
    Table,
    /// Anything else.
    Answer,
}

/// Number of sentences examined at the start and at the end.
const SENTENCES: (usize, usize) = (16, 4);

/// Number of words examined in a sentence.
const WORDS: usize = 40;

/// The kind of answer that `user` asks for.
pub fn task(user: &str) -> Task {
    let sentences = sentences(user);
    let (start, end) = SENTENCES;
    let tail = sentences.len().saturating_sub(end).max(start);
    let mut first = None;
    for (i, sentence) in sentences.iter().enumerate() {
        if i >= start && i < tail {
            continue;
        }
        match asks_for(sentence) {
            Some((Verb::Reply, task)) => return task,
            Some((_, task)) => first = first.or(Some(task)),
            None => {}
        }
    }
    first.unwrap_or(Task::Answer)
}

/// The verb that a sentence begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    /// "Write a function": the answer is a new object.
    Make,
    /// "Optimize this query": the answer is the changed object.
    Fix,
    /// "Convert this to YAML": the noun after "to" is the answer.
    Convert,
    /// "Extract the names as JSON": the form decides, not the source.
    Take,
    /// "Answer in JSON": only about the form.
    Reply,
    /// "Translate to French".
    Translate,
    /// "Explain this", "What is": prose about any subject.
    Tell,
}

#[rustfmt::skip]
const VERBS: &[(Verb, &[&str])] = &[
    (Verb::Make, &["write", "create", "implement", "code", "build", "generate", "develop",
        "program", "make", "need", "want", "design", "compose", "schreibe", "schreib", "erstelle",
        "implementiere", "programmiere", "écris", "écrivez", "ecris", "crée", "créez", "escribe",
        "crea", "implementa", "genera", "scrivi", "escreva", "crie", "напиши", "напишите"]),
    (Verb::Fix, &["optimize", "optimise", "fix", "correct", "repair", "complete", "improve",
        "refactor", "debug", "format", "simplify", "update", "extend", "modify", "optimiere",
        "korrigiere", "verbessere", "corrige", "corrigez", "optimiza", "ottimizza", "otimize",
        "optimisez", "исправь"]),
    (Verb::Convert, &["convert", "transform", "turn", "port", "rewrite", "migrate", "change",
        "wandle", "konvertiere", "convertis", "convertissez", "convierte", "converti",
        "converta"]),
    (Verb::Take, &["extract", "list", "find", "parse", "collect", "identify", "classify",
        "enumerate", "fill", "put", "summarize", "summarise", "describe", "compare", "extrahiere",
        "liste", "extrais", "extrayez", "extrae", "estrai", "extraia", "извлеки"]),
    (Verb::Reply, &["answer", "reply", "respond", "return", "output", "give", "provide", "show",
        "print", "produce", "use", "antworte", "gib", "zeige", "réponds", "répondez", "donne",
        "donnez", "responde", "devuelve", "rispondi", "responda", "ответь"]),
    (Verb::Translate, &["translate", "übersetze", "übersetz", "übersetzen", "uebersetze",
        "traduis", "traduisez", "traduire", "traduce", "traducir", "traduzca", "traduci",
        "traduza", "traduzir", "vertaal", "переведи", "переведите"]),
    (Verb::Tell, &["explain", "discuss", "tell", "what", "why", "who", "whose", "when", "where",
        "which", "how", "is", "are", "do", "does", "did", "was", "were", "should", "erkläre",
        "warum", "wer", "wo", "wann", "wie", "welche", "explique", "expliquez", "pourquoi",
        "comment", "quel", "quelle", "qui", "explica", "qué", "cómo", "quién", "spiega", "cosa"]),
];

/// Words before the verb that carry no meaning here.
#[rustfmt::skip]
const FILLERS: &[&str] = &[
    "please", "kindly", "can", "could", "would", "will", "you", "i", "d", "we", "to", "like",
    "me", "us", "now", "then", "also", "just", "so", "ok", "okay", "hi", "hello", "hey", "let",
    "and", "task", "instruction", "bitte", "kannst", "könntest", "können", "du", "sie", "mir",
    "pouvez", "peux", "vous", "tu", "por", "favor", "puedes", "per", "favore", "puoi",
    "пожалуйста",
];

/// Words for programming languages, with the name that follows ```.
#[rustfmt::skip]
const LANGUAGES: &[(&str, &str)] = &[
    ("python", "python"), ("python3", "python"), ("py", "python"), ("pandas", "python"),
    ("numpy", "python"), ("javascript", "javascript"), ("js", "javascript"),
    ("node", "javascript"), ("react", "jsx"), ("typescript", "typescript"), ("ts", "typescript"),
    ("rust", "rust"), ("java", "java"), ("kotlin", "kotlin"), ("scala", "scala"),
    ("swift", "swift"), ("go", "go"), ("golang", "go"), ("c", "c"), ("c++", "cpp"),
    ("cpp", "cpp"), ("c#", "csharp"), ("csharp", "csharp"), ("ruby", "ruby"), ("php", "php"),
    ("perl", "perl"), ("lua", "lua"), ("haskell", "haskell"), ("julia", "julia"), ("r", "r"),
    ("bash", "bash"), ("shell", "bash"), ("powershell", "powershell"), ("html", "html"),
    ("css", "css"), ("yaml", "yaml"), ("toml", "toml"), ("xml", "xml"), ("csv", "csv"),
    ("dockerfile", "dockerfile"), ("makefile", "makefile"), ("latex", "latex"),
];

/// Objects that are code in any language.
const CODE: &[&str] = &[
    "function",
    "functions",
    "snippet",
    "regex",
    "subroutine",
    "funktion",
    "fonction",
    "función",
    "funcion",
    "funzione",
    "função",
    "функцию",
];

/// Objects that are code if a language precedes them, or "that" and the like follows.
#[rustfmt::skip]
const PERHAPS_CODE: &[&str] = &[
    "code", "script", "program", "class", "method", "test", "tests", "component", "module",
    "algorithm", "app", "application", "game", "server", "implementation", "solution", "parser",
    "cli", "command", "one", "liner", "oneliner", "page", "file", "config", "document", "format",
    "loop", "decorator", "struct", "macro", "library", "api", "crawler", "bot", "skript",
    "programm", "programme", "programa", "programma", "codice", "código", "клас", "скрипт",
];

/// Objects that are prose about any subject.
#[rustfmt::skip]
const PROSE: &[&str] = &[
    "story", "poem", "haiku", "essay", "article", "email", "mail", "letter", "summary",
    "explanation", "report", "blog", "post", "paragraph", "sentence", "sentences", "joke", "song",
    "description", "review", "speech", "message", "documentation", "introduction", "tutorial",
    "plan", "outline",
];

/// Words that mark the next word as a form: "as JSON", "a table".
#[rustfmt::skip]
const AS: &[&str] = &[
    "as", "in", "into", "to", "valid", "only", "using", "a", "an", "of", "als", "ins", "nach",
    "en", "au", "como", "come", "em", "um", "eine", "una", "un", "une", "в", "как",
];

/// Words that mark the next word as a source: "from this JSON".
#[rustfmt::skip]
const SOURCE: &[&str] = &[
    "this", "that", "these", "following", "from", "below", "above", "given", "my", "our",
    "about", "diese", "dieses", "dieser", "diesem", "folgende", "cette", "ce", "este", "esta",
    "questa", "questo",
];

/// The kind of answer that one sentence asks for; `None` if it is not an instruction, or one about the
/// form ([`Verb::Reply`]) that names no form.
fn asks_for(sentence: &str) -> Option<(Verb, Task)> {
    if let Some(task) = asks_for_in_east_asian(sentence) {
        return Some((Verb::Make, task));
    }
    // "Given the list, write a function": the instruction may follow a comma.
    let starts = std::iter::once(0).chain(sentence.match_indices(", ").map(|(at, _)| at + 2));
    let (verb, words) = starts.take(3).find_map(|at| {
        let words = words(&sentence[at..]);
        let at = words.iter().position(|word| !FILLERS.contains(&word.as_str()))?;
        let verb = verb(&words[at])?;
        Some((verb, words[at + 1..].to_vec()))
    })?;
    let all = self::words(sentence);
    let task = match verb {
        Verb::Tell => Some(Task::Answer),
        Verb::Translate => Some(target(&words).map_or(Task::Translation, |task| match task {
            Task::Code(_) | Task::Sql => task,
            _ => Task::Translation,
        })),
        Verb::Convert => target(&words).or_else(|| object(Verb::Fix, &words, &all)),
        Verb::Make | Verb::Fix | Verb::Take | Verb::Reply => object(verb, &words, &all),
    };
    match (verb, task) {
        (Verb::Reply, None) => None,
        (_, task) => Some((verb, task.unwrap_or(Task::Answer))),
    }
}

fn verb(word: &str) -> Option<Verb> {
    VERBS.iter().find(|(_, words)| words.contains(&word)).map(|(verb, _)| *verb)
}

/// The form named after "to" or "into".
fn target(words: &[String]) -> Option<Task> {
    let is_to = |word: &String| ["to", "into", "nach", "in", "en", "as", "a"].contains(&&**word);
    let after = words.iter().enumerate().filter(|(_, word)| is_to(word)).map(|(i, _)| i + 1);
    after.filter_map(|i| words.get(i)).find_map(|word| named_form(word))
}

/// The form that a single word names.
fn named_form(word: &str) -> Option<Task> {
    match word {
        "json" => Some(Task::Json),
        _ if is_sql(word) => Some(Task::Sql),
        _ => language(word).map(Task::Code),
    }
}

fn language(word: &str) -> Option<&'static str> {
    LANGUAGES.iter().find(|(name, _)| *name == word).map(|(_, fence)| *fence)
}

fn is_sql(word: &str) -> bool {
    ["sql", "mysql", "postgres", "postgresql", "sqlite", "tsql", "plsql"].contains(&word)
}

/// The kind named by the first object after the verb. `all` is the whole sentence: in "Using Python,
/// write ..." the language precedes the verb.
fn object(verb: Verb, words: &[String], all: &[String]) -> Option<Task> {
    let word = |i: usize| words.get(i).map_or("", String::as_str);
    for (i, name) in words.iter().map(String::as_str).enumerate() {
        let before = if i == 0 { "" } else { word(i - 1) };
        let after = word(i + 1);
        // Only the object of a change can be "this query".
        let is_source = verb != Verb::Fix && SOURCE.contains(&before);
        let is_form = AS.contains(&before) || i == 0 || verb == Verb::Fix && !is_source;
        let is_tool = ["parser", "library", "api", "injection", "validator", "schema", "server"]
            .contains(&after);
        match name {
            _ if verb == Verb::Make && PROSE.contains(&name) => return Some(Task::Answer),
            "json" if is_tool => {}
            "json" if verb != Verb::Take && !is_source => return Some(Task::Json),
            "json" if is_form || ["list", "array", "object", "format"].contains(&after) => {
                if !is_source {
                    return Some(Task::Json);
                }
            }
            "table" | "tabelle" | "tableau" | "tabla" | "tabella" | "tabela" => {
                if before == "markdown" || ["as", "in"].contains(&word(i.wrapping_sub(2))) {
                    return Some(Task::Table);
                }
                if ["als", "as"].contains(&before) {
                    return Some(Task::Table);
                }
            }
            _ if verb == Verb::Take => {
                let structured = ["yaml", "toml", "xml", "csv", "html", "latex"].contains(&name);
                if structured && is_form && !is_source {
                    return language(name).map(Task::Code);
                }
            }
            _ if is_sql(name) && !is_tool && !is_source => return Some(Task::Sql),
            "query" | "abfrage" | "requête" | "consulta" if verb != Verb::Reply && !is_source => {
                return Some(Task::Sql);
            }
            _ if CODE.contains(&name) => return Some(Task::Code(language_in(all))),
            _ if PERHAPS_CODE.contains(&name) => {
                let purpose = ["that", "which", "to", "in", "die", "das", "qui", "que", "che"];
                let coded = ["code", "script", "skript", "program"].contains(&name)
                    && purpose.contains(&after);
                if coded && verb != Verb::Reply {
                    return Some(Task::Code(language_in(all)));
                }
            }
            _ => {
                let Some(fence) = language(name) else { continue };
                let of_code = PERHAPS_CODE.contains(&after) || CODE.contains(&after);
                let used = ["in", "using", "as", "into", "auf", "en"].contains(&before);
                let named = used || verb == Verb::Fix && before == "this" || i == 0;
                // "c", "r" and "go" are also ordinary words: they need a noun, or "in" before and
                // nothing after them.
                let short = name.len() < 3 && !(of_code || used && i + 1 >= words.len());
                if (of_code || named) && !short {
                    return Some(Task::Code(fence));
                }
            }
        }
    }
    None
}

/// The first language that a sentence names.
fn language_in(words: &[String]) -> &'static str {
    let mut previous = "";
    for word in words {
        let one_of_many = word.len() < 3 && !["in", "a", "using"].contains(&previous);
        if let (Some(fence), false) = (language(word), one_of_many) {
            return fence;
        }
        previous = word;
    }
    ""
}

/// Whole phrases decide in Chinese, Japanese and Korean, which separate words without spaces.
fn asks_for_in_east_asian(sentence: &str) -> Option<Task> {
    let has = |any: &[&str]| any.iter().any(|phrase| sentence.contains(phrase));
    if !sentence.chars().any(|c| ('\u{2e80}'..='\u{d7a3}').contains(&c)) {
        return None;
    }
    if has(&["翻译", "翻譯", "翻訳", "번역"]) {
        return Some(Task::Translation);
    }
    let words = words(sentence);
    if words.iter().any(|word| word == "json") && has(&["格式", "形式", "형식", "返回", "输出"])
    {
        return Some(Task::Json);
    }
    if words.iter().any(|word| is_sql(word))
        && has(&["写", "寫", "优化", "書いて", "最適化", "작성"])
    {
        return Some(Task::Sql);
    }
    has(&["函数", "函數", "関数", "함수"]).then(|| Task::Code(language_in(&words)))
}

/// The sentences of a text outside ``` fences, without punctuation.
fn sentences(text: &str) -> Vec<&str> {
    let mut sentences = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        if fenced {
            continue;
        }
        let mut start = 0;
        for (at, mark) in line.match_indices(['.', '?', '!', ':', ';', '。', '？', '！', '：'])
        {
            let end = at + mark.len();
            // "foo.py" and "12:30" do not end a sentence.
            if mark.len() > 1 || line[end..].starts_with(' ') || end == line.len() {
                sentences.push(line[start..at].trim());
                start = end;
            }
        }
        sentences.push(line[start..].trim());
    }
    sentences.retain(|sentence| !sentence.is_empty());
    sentences
}

/// The words of a sentence in lower case; `c++` and `c#` are words.
fn words(sentence: &str) -> Vec<String> {
    let is_east_asian = |c: char| ('\u{2e80}'..='\u{d7a3}').contains(&c);
    let is_word = |c: char| (c.is_alphanumeric() || "+#".contains(c)) && !is_east_asian(c);
    let parts = sentence.split(|c| !is_word(c)).filter(|part| !part.is_empty());
    parts.take(WORDS).map(str::to_lowercase).collect()
}

#[cfg(test)]
mod tests;
