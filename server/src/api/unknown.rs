//! Unknown fields of the elements of a conversation: items of responses, blocks of Anthropic's messages.
//!
//! Clients send back what servers gave them, and vendors add fields to it. An unknown field there does not
//! block the conversation; it is left out, with a note.

use serde_json::Value;

/// Most fields that are named in notes.
const NAMED: usize = 32;

/// A row for each type of element: its fields.
pub type Fields = [(&'static str, &'static [&'static str])];

/// The fields of elements of type `kind`; `None` if there is no such type.
pub fn fields_of(table: &Fields, kind: &str) -> Option<&'static [&'static str]> {
    table.iter().find(|(known, _)| *known == kind).map(|(_, fields)| *fields)
}

/// The unknown fields of one body.
#[derive(Debug, Default)]
pub struct Unknown {
    /// In order of their first places.
    fields: Vec<Field>,
    /// Places of the fields that are not named.
    others: usize,
}

#[derive(Debug)]
struct Field {
    kind: String,
    name: String,
    /// Its first place.
    path: String,
    /// Its other places.
    more: usize,
}

impl Unknown {
    /// Adds the fields of the element `value` that are not null, `type` or in `known`. The element is of type
    /// `kind` and stands at `path`.
    pub fn check(&mut self, path: &str, kind: &str, value: &Value, known: &[&str]) {
        for (name, value) in value.as_object().into_iter().flatten() {
            if name == "type" || value.is_null() || known.contains(&name.as_str()) {
                continue;
            }
            let same = |field: &&mut Field| field.kind == kind && field.name == *name;
            if let Some(field) = self.fields.iter_mut().find(same) {
                field.more += 1;
            } else if self.fields.len() < NAMED {
                let (kind, name) = (kind.into(), name.clone());
                self.fields.push(Field { kind, name, path: path.into(), more: 0 });
            } else {
                self.others += 1;
            }
        }
    }

    /// A note for each field, with its first place and the number of the others.
    pub fn notes(self) -> impl Iterator<Item = String> {
        let note = |Field { name, path, more, .. }| {
            let path: String = path;
            let others = match more {
                0 => String::new(),
                1 => ", also in 1 other place".into(),
                more => format!(", also in {more} other places"),
            };
            format!("{path}.{name}: left out, because the field is not known{others}")
        };
        let others = (self.others > 0)
            .then(|| format!("left out {} other fields that are not known", self.others));
        self.fields.into_iter().map(note).chain(others)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_field_is_noted_once_for_each_type() {
        let mut unknown = Unknown::default();
        let element = json!({"type": "a", "text": "x", "colour": 1, "shape": null});
        for (path, kind) in [("m[0]", "a"), ("m[1]", "a"), ("m[2]", "b"), ("m[3]", "a")] {
            unknown.check(path, kind, &element, &["text"]);
        }
        let notes: Vec<_> = unknown.notes().collect();
        let note = "m[0].colour: left out, because the field is not known, also in 2 other places";
        assert_eq!(notes, [note, "m[2].colour: left out, because the field is not known"]);
    }

    #[test]
    fn the_number_of_notes_is_limited() {
        let mut unknown = Unknown::default();
        for number in 0..NAMED + 7 {
            unknown.check("m[0]", "a", &json!({format!("f{number}"): 1}), &[]);
        }
        let notes: Vec<_> = unknown.notes().collect();
        assert_eq!(notes.len(), NAMED + 1);
        assert_eq!(notes[NAMED], "left out 7 other fields that are not known");
    }
}
