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
    let replacing = |old: &str, new: &str| Scripted {
        replacements: vec![Replacement { message: 0, old: old.into(), new: new.into() }],
        ..Scripted::default()
    };
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
        apply_replacements(&mut texts, &all).unwrap();
        assert_eq!(texts, [system], "{old}");
        let Call::Prompt(seen) = &last.calls()[0] else { panic!() };
        assert_eq!(seen.system, [system]);
    }
}
