//! Watches a reply for the texts and tokens after which its plan wants `on-step` to be called.

use crate::contract::Plan;

/// The texts and tokens of a plan.
#[derive(Debug)]
pub struct Watch {
    texts: Vec<String>,
    tokens: Vec<u32>,
    /// The newest text of the reply, in which one of the texts may begin.
    recent: String,
    /// Bytes of the longest text.
    longest: usize,
    /// Texts that the newest token completes.
    found: Vec<String>,
}

impl Watch {
    /// The watch of a plan; `None` if it waits for neither texts nor tokens.
    pub fn new(plan: &Plan) -> Option<Self> {
        let Plan { on_texts, on_tokens, .. } = plan;
        (!on_texts.is_empty() || !on_tokens.is_empty()).then(|| Self {
            longest: on_texts.iter().map(String::len).max().unwrap_or(0),
            texts: on_texts.clone(),
            tokens: on_tokens.clone(),
            recent: String::new(),
            found: Vec::new(),
        })
    }

    /// Reads the text that a token adds.
    pub fn read(&mut self, new: &str) {
        self.found.clear();
        if self.longest == 0 || new.is_empty() {
            return;
        }
        let before = self.recent.len();
        self.recent.push_str(new);
        let recent = self.recent.as_bytes();
        for text in &self.texts {
            // One that ends in the new text.
            let start = (before + 1).saturating_sub(text.len());
            if recent[start..].windows(text.len()).any(|part| part == text.as_bytes()) {
                self.found.push(text.clone());
            }
        }
        let surplus = self.recent.len().saturating_sub(self.longest);
        let surplus = self.recent.ceil_char_boundary(surplus);
        self.recent.drain(..surplus);
    }

    /// The texts that `token`, the newest, completes, and whether it is one of the tokens.
    pub fn found(&mut self, token: u32) -> (Vec<String>, bool) {
        (std::mem::take(&mut self.found), self.tokens.contains(&token))
    }

    /// Forgets what was read.
    pub fn clear(&mut self) {
        self.recent.clear();
        self.found.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_found_once_where_it_is_completed() {
        let on_texts = ["an END", "END", "ö", "."].map(String::from).to_vec();
        let plan = Plan { on_texts, on_tokens: vec![7], ..Plan::default() };
        let mut watch = Watch::new(&plan).unwrap();
        let mut found = |new: &str| {
            watch.read(new);
            watch.found(7).0.join("|")
        };
        let pieces = ["an E", "N", "D", "", "x", ". END.", "ö", "END", "ENDEN", "D"];
        let expected = ["", "", "an END|END", "", "", "END|.", "ö", "END", "END", "END"];
        assert_eq!(pieces.map(&mut found), expected);
        watch.read("EN");
        watch.clear();
        watch.read("D");
        assert_eq!(watch.found(8), (vec![], false));
        assert!(Watch::new(&Plan::default()).is_none());
    }
}
