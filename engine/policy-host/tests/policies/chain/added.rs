//! A later policy of a chain neither takes back nor uses up what an earlier one did.

use super::*;

/// A rewind by any policy was carried out.
#[test]
fn a_later_policy_does_not_rewind_what_an_earlier_one_injected() {
    let scripted = |actions: Vec<Vec<Action>>| Scripted {
        plan: Plan { every: 1, ..Plan::default() },
        actions,
        ..Scripted::default()
    };
    let inject = || vec![Action::Inject("stay".into())];
    let rewind = || vec![Action::Rewind(9)];
    let at = |index: u32| Step { index, tokens: vec![1], budget_reached: true, ..Step::default() };
    // The first injects after 10 tokens: 4 more, and one is sampled.
    let indices = [10, 15, 18, 30];
    let later = boxed([
        scripted(vec![inject(), vec![], vec![]]),
        scripted(vec![vec![], rewind(), rewind(), rewind()]),
    ]);
    let earlier = boxed([
        scripted(vec![vec![], rewind(), rewind(), rewind()]),
        scripted(vec![inject(), vec![], vec![]]),
    ]);
    let ninth = Some(Action::Rewind(9));
    for (mut chain, expected) in [
        (later, [None, Some(Action::Rewind(3)), ninth.clone()]),
        (earlier, [ninth.clone(), ninth.clone(), ninth]),
    ] {
        chain.ask(&RequestView::default()).unwrap();
        let answers = indices.map(|index| chain.ask(&at(index)).unwrap().pop());
        assert_eq!(answers[0], Some(Action::Inject("stay".into())));
        assert_eq!(answers[1..], expected);
    }
}

/// The engine counted the repairs of a request: once a policy had used them up, it accepted the call that an
/// earlier one would have repaired.
#[test]
fn each_policy_has_repairs_of_its_own() {
    let repairing = |text: &str| Scripted {
        verdict: Some(Verdict::Repair(text.into())),
        ..Scripted::default()
    };
    let mut chain = boxed([repairing("first"), repairing("second"), Scripted::default()]);
    let verdicts = [(); 9].map(|()| chain.ask(&ToolCallView::default()).unwrap());
    let repairs = |text: &str| vec![Verdict::Repair(text.into()); MAX_REPAIRS as usize];
    let expected = [repairs("first"), repairs("second"), vec![Verdict::Accept]].concat();
    assert_eq!(verdicts[..], expected);
}

/// The second removed what the first had put into the system text.
#[test]
fn a_later_policy_does_not_replace_what_an_earlier_one_added() {
    let replacing =
        |old: &str, new: &str| Scripted { edits: vec![replace(old, new)], ..Scripted::default() };
    let prompt = PromptView { system: vec!["Be brief.".into()], ..PromptView::default() };
    for (old, new, system) in [
        ("Never lie. ", "", "Never lie. Be brief."),
        ("Never lie", "Never ever lie", "Never lie. Be brief."),
        ("lie. Be", "lie. Do be", "Never lie. Do be brief."),
        ("Never", "Always", "Never lie. Be brief."),
        ("brief", "short", "Never lie. Be short."),
        ("Be", "Do be", "Never lie. Do be brief."),
    ] {
        let first = replacing("Be brief", "Never lie. Be brief");
        let last = Scripted::default();
        let mut chain = boxed([first, replacing(old, new), last.clone()]);
        let all = chain.ask(&prompt).unwrap();
        let mut texts = prompt.system.clone();
        apply_edits(&mut texts, &all).unwrap();
        assert_eq!(texts, [system], "{old}");
        let Call::Prompt(seen) = &last.calls()[0] else { panic!() };
        assert_eq!(seen.system, [system]);
    }
}

/// The chain's answer to a piece of text at `position`.
fn piece(chain: &mut Box<dyn Policy>, position: usize, text: &str, end: bool) -> String {
    let position = u32::try_from(position).unwrap();
    let view = TextView { position, text: text.into(), end };
    match chain.ask(&view).unwrap() {
        TextVerdict::Pass => text.into(),
        TextVerdict::Replace(TextChange { text, hold: 0 }) => text,
        other => panic!("{other:?}: the chain holds text itself"),
    }
}

fn texts(text: fn(&TextView) -> TextVerdict) -> Scripted {
    Scripted { text: Some(text), ..Scripted::default() }
}

fn change(text: String) -> TextVerdict {
    TextVerdict::Replace(TextChange { text, hold: 0 })
}

#[test]
fn a_later_policy_sees_what_earlier_ones_let_through_and_does_not_bring_back_what_they_replaced() {
    let hiding = texts(|view| change(view.text.replace("swordfish", "***")));
    let last = texts(|view| change(format!("{} (the word is swordfish)", view.text)));
    let mut chain = boxed([hiding.clone(), last.clone()]);
    // Nothing was replaced yet, and the second may write what it likes.
    assert_eq!(piece(&mut chain, 0, "hello", false), "hello (the word is swordfish)");
    assert_eq!(piece(&mut chain, 5, " swordfish", false), " ***");
    assert_eq!(piece(&mut chain, 15, "!", true), "!");
    let refused = "did not replace answer text as `scripted` wants: it contains what a policy before it replaced";
    assert_eq!(chain.take_report().notes, [refused, refused]);
    let Call::Text(seen) = &last.calls()[1] else { panic!("{:?}", last.calls()) };
    assert_eq!((&*seen.text, seen.position), (" ***", 5));
    // In the other order the word is replaced.
    let mut chain = boxed([last, hiding]);
    assert_eq!(piece(&mut chain, 0, "hi", false), "hi (the word is ***)");
}

/// Random chains over random pieces, holds and rewinds: without replacements the text comes through as it was written,
/// in order, and with them nothing that one removes.
#[test]
fn text_comes_through_a_chain_once_and_without_what_a_policy_removes() {
    let holding = |view: &TextView| {
        let length = u32::try_from(view.text.len()).unwrap();
        TextVerdict::Hold((view.position + length) % 7)
    };
    let removing = |view: &TextView| {
        let mut text = view.text.replace("##", "-");
        let hold = u32::from(text.ends_with('#'));
        text.truncate(text.len() - hold as usize);
        TextVerdict::Replace(TextChange { text, hold })
    };
    let all: [fn(&TextView) -> TextVerdict; 3] = [holding, removing, |_| TextVerdict::Pass];
    let mut random = Random(11);
    for _ in 0..2000 {
        let count = 1 + random.below(4);
        let kinds: Vec<usize> = (0..count).map(|_| random.below(3)).collect();
        let mut chain = boxed(kinds.iter().map(|kind| texts(all[*kind])));
        let (mut written, mut sent) = (String::new(), String::new());
        // What was written and sent after each piece, to which a rewind returns.
        let mut marks = vec![(0, 0)];
        for number in 0..random.below(20) {
            if random.below(4) == 0 && number > 0 {
                let kept = 1 + random.below(marks.len());
                marks.truncate(kept);
                let (position, length) = marks[kept - 1];
                written.truncate(position);
                sent.truncate(length);
            }
            let text: String =
                (0..1 + random.below(4)).map(|_| random.of(&["a", "ö", "#", "##"])).collect();
            sent += &piece(&mut chain, written.len(), &text, false);
            written += &text;
            marks.push((written.len(), sent.len()));
        }
        sent += &piece(&mut chain, written.len(), "", true);
        if kinds.contains(&1) {
            assert!(!sent.contains("##"), "{kinds:?}: {written} {sent}");
        } else {
            assert_eq!(sent, written, "{kinds:?}");
        }
    }
}

#[test]
fn the_first_value_of_a_label_applies() {
    let labelled = |labels: &[(&str, &str)]| {
        let labels = labels.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        Scripted { labels: labels.collect(), ..Scripted::default() }
    };
    let mut chain = boxed([labelled(&[("a", "1")]), labelled(&[("b", "2"), ("a", "3")])]);
    let labels = chain.ask(&Summary::default()).unwrap();
    assert_eq!(labels, [("a".into(), "1".into()), ("b".to_owned(), "2".to_owned())]);
}
