//! Reasoning in `<think>` and `</think>` at the beginning of an answer, of servers that do not tell it apart.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Most bytes of white space before an opening tag. A model may write white space without end, which its client, the
/// limit of the reply and the loop detector have to see.
const SPACE: usize = 256;

/// Most line breaks before a closing tag that are held back, and left out.
const BREAKS: usize = 16;

/// Tells reasoning and answer apart in a text that comes in parts.
#[derive(Debug, Default)]
pub struct Tags {
    place: Place,
    /// Text that may begin a tag.
    held: String,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Nothing was written but white space.
    #[default]
    Start,
    /// The line breaks after the opening tag.
    Opening,
    Reasoning,
    /// The line breaks after the reasoning.
    Gap,
    Answer,
}

impl Tags {
    /// The tags of an upstream that tells reasoning apart itself: none are looked for.
    pub fn none() -> Self {
        Self { place: Place::Answer, held: String::new() }
    }

    /// The tags of a text that continues reasoning.
    pub fn in_reasoning() -> Self {
        Self { place: Place::Reasoning, held: String::new() }
    }

    /// The upstream has sent reasoning in a field of its own: there are no tags.
    pub fn separated(&mut self) {
        if self.held.is_empty() {
            self.place = Place::Answer;
        }
    }

    /// Adds text; `out` gets what is known of it, and whether it is reasoning.
    pub fn push(&mut self, text: &str, mut out: impl FnMut(bool, String)) {
        self.held.push_str(text);
        loop {
            match self.place {
                Place::Start => {
                    let start = self.held.trim_start();
                    if let Some(rest) = start.strip_prefix(OPEN) {
                        (self.place, self.held) = (Place::Opening, rest.into());
                    } else if OPEN.starts_with(start) && self.held.len() <= SPACE {
                        return;
                    } else {
                        self.place = Place::Answer;
                    }
                }
                Place::Opening => {
                    self.held = self.held.trim_start_matches('\n').into();
                    if self.held.is_empty() {
                        return;
                    }
                    self.place = Place::Reasoning;
                }
                Place::Reasoning => {
                    if let Some(at) = self.held.find(CLOSE) {
                        let rest = self.held.split_off(at);
                        let reasoning = std::mem::take(&mut self.held);
                        let reasoning = reasoning.trim_end_matches('\n');
                        if !reasoning.is_empty() {
                            out(true, reasoning.into());
                        }
                        (self.place, self.held) = (Place::Gap, rest[CLOSE.len()..].into());
                    } else {
                        let kept = held_at_end(&self.held);
                        let rest = self.held.split_off(self.held.len() - kept);
                        let reasoning = std::mem::replace(&mut self.held, rest);
                        if !reasoning.is_empty() {
                            out(true, reasoning);
                        }
                        return;
                    }
                }
                Place::Gap => {
                    self.held = self.held.trim_start_matches('\n').into();
                    if self.held.is_empty() {
                        return;
                    }
                    self.place = Place::Answer;
                }
                Place::Answer => {
                    let answer = std::mem::take(&mut self.held);
                    if !answer.is_empty() {
                        out(false, answer);
                    }
                    return;
                }
            }
        }
    }

    /// Ends the text.
    pub fn end(&mut self, mut out: impl FnMut(bool, String)) {
        let held = std::mem::take(&mut self.held);
        if !held.is_empty() {
            out(self.place == Place::Reasoning, held);
        }
    }
}

/// Bytes at the end of reasoning that may begin a tag, with the last line breaks before it.
fn held_at_end(text: &str) -> usize {
    let tag = (1..CLOSE.len()).rev().find(|n| text.ends_with(&CLOSE[..*n])).unwrap_or(0);
    let before = &text[..text.len() - tag];
    tag + (before.len() - before.trim_end_matches('\n').len()).min(BREAKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(mut tags: Tags, parts: &[&str]) -> (String, String) {
        let (mut reasoning, mut answer) = (String::new(), String::new());
        let mut out = |is_reasoning: bool, text: String| match is_reasoning {
            true => reasoning += &text,
            false => answer += &text,
        };
        parts.iter().for_each(|part| tags.push(part, &mut out));
        tags.end(&mut out);
        (reasoning, answer)
    }

    #[test]
    fn reasoning_in_tags_is_told_apart_however_it_is_cut() {
        let text = "\n<think>\nTwo < three.\n\n</thin</think>\n\nYes: <think>.";
        let expected = ("Two < three.\n\n</thin".to_string(), "Yes: <think>.".to_string());
        assert_eq!(split(Tags::default(), &[text]), expected);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(split(Tags::default(), &letters), expected);
    }

    /// A model that wrote line breaks without end was neither seen nor ended, and they were read again with each new
    /// one.
    #[test]
    fn white_space_without_end_is_not_held() {
        for (mut tags, space) in [(Tags::default(), " \n"), (Tags::in_reasoning(), "\n")] {
            let mut passed = 0;
            (0..1000).for_each(|_| tags.push(space, |_, text| passed += text.len()));
            let all = 1000 * space.len();
            assert!(passed >= all - SPACE && tags.held.len() <= SPACE, "{passed} of {all}");
            assert_eq!(passed + tags.held.len(), all);
        }
    }

    #[test]
    fn other_text_passes() {
        let check = |parts: &[&str]| split(Tags::default(), parts);
        assert_eq!(check(&["  <thi", "s>"]), (String::new(), "  <this>".into()));
        assert_eq!(check(&["<thi"]), (String::new(), "<thi".into()));
        assert_eq!(check(&["<think>a", "b"]), ("ab".into(), String::new()));
        let none = split(Tags::none(), &["<think>a</think>"]);
        assert_eq!(none, (String::new(), "<think>a</think>".into()));
        let open = split(Tags::in_reasoning(), &["a</think>\n\nb"]);
        assert_eq!(open, ("a".into(), "b".into()));
    }
}
