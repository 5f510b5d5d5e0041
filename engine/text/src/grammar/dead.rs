//! Finds where a reply in a form would be stuck: after text that the form allows, nothing may follow.
//!
//! llguidance tests terminals, not rules: a terminal that matches no text makes all rules that need it useless,
//! but the parser enters them, and only the mask behind the text before says that no token is left. That
//! was an error in mid-stream. Such a form is refused when it is compiled.

use std::collections::{HashMap, HashSet};

use llguidance::earley::{CGrammar, CSymIdx};

/// Whether text of `grammar` leads into a rule that cannot be completed, as the terminals `empty` match no text.
pub fn has_dead_end(grammar: &CGrammar, empty: &HashSet<usize>) -> bool {
    if empty.is_empty() {
        return false;
    }
    let symbols = reachable(grammar);
    // Whether a symbol has a text, and whether it has one that is not empty.
    let (mut complete, mut written) = (vec![false; symbols.len()], vec![false; symbols.len()]);
    let mut changed = true;
    while changed {
        changed = false;
        for (i, symbol) in symbols.iter().enumerate().rev() {
            let matches = symbol.terminal.is_some_and(|lexeme| !empty.contains(&lexeme));
            let whole = symbol.rules.iter().filter(|rule| rule.iter().all(|&part| complete[part]));
            let writes = whole.clone().flatten().any(|&part| written[part]) || matches;
            let completes = symbol.is_nullable || matches || whole.count() > 0;
            if (completes, writes) != (complete[i], written[i]) {
                (complete[i], written[i], changed) = (completes, writes, true);
            }
        }
    }
    symbols.iter().flat_map(|symbol| &symbol.rules).any(|rule| {
        let begin = rule.iter().take_while(|&&part| complete[part]);
        begin.clone().count() < rule.len() && begin.clone().any(|&part| written[part])
    })
}

/// A symbol of a grammar. Parts of its rules are indices of symbols.
struct Symbol {
    terminal: Option<usize>,
    is_nullable: bool,
    rules: Vec<Vec<usize>>,
}

/// The symbols that a reply can reach.
fn reachable(grammar: &CGrammar) -> Vec<Symbol> {
    let mut order = vec![grammar.start()];
    let mut numbers = HashMap::from([(grammar.start(), 0)]);
    let mut symbols = Vec::new();
    while let Some(&symbol) = order.get(symbols.len()) {
        let data = grammar.sym_data(symbol);
        let mut number = |part: CSymIdx| {
            *numbers.entry(part).or_insert_with(|| {
                order.push(part);
                order.len() - 1
            })
        };
        let parts = |rule| grammar.rule_rhs(rule).0;
        let rules =
            data.rules.iter().map(|&rule| parts(rule).iter().map(|&part| number(part)).collect());
        symbols.push(Symbol {
            terminal: data.lexeme.map(|lexeme| lexeme.as_usize()),
            is_nullable: data.is_nullable || !data.cond_nullable.is_empty(),
            rules: rules.collect(),
        });
    }
    symbols
}
