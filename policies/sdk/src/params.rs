//! Reading parameters.

/// Reads parameters with `set`, which gets the name and the text of each: it returns whether the text can be used,
/// or `None` for a parameter that it does not know. Returns what is wrong, in the words from which the server learns
/// that a parameter is misspelt.
///
/// ```
/// use steersman_policy::read_params;
///
/// let (mut budget, params) = (100, vec![("budget".to_owned(), "many".to_owned())]);
/// let problems = read_params(&params, |name, text| match name {
///     "budget" => Some(text.parse().map(|tokens| budget = tokens).is_ok()),
///     _ => None,
/// });
/// assert_eq!(problems, ["parameter `budget` cannot be `many`"]);
/// assert_eq!(budget, 100);
/// ```
pub fn read_params(
    params: &[(String, String)],
    mut set: impl FnMut(&str, &str) -> Option<bool>,
) -> Vec<String> {
    let problem = |(name, text): &(String, String)| match set(name, text) {
        Some(true) => None,
        Some(false) => Some(format!("parameter `{name}` cannot be `{text}`")),
        None => Some(format!("unknown parameter `{name}`")),
    };
    params.iter().filter_map(problem).collect()
}

/// A note of problems, for [`crate::Plan::note`]; `None` if there are none.
pub fn note(problems: &[String]) -> Option<String> {
    (!problems.is_empty()).then(|| problems.join("; "))
}

/// The texts of a parameter that are separated by `|`; `None` if one is empty.
pub fn texts(text: &str) -> Option<Vec<String>> {
    let texts: Vec<_> = text.split('|').map(|text| text.trim().to_owned()).collect();
    texts.iter().all(|text| !text.is_empty()).then_some(texts)
}
