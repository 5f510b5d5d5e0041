//! Bars with ranges as SVG, in light and dark.
//!
//! A plot is a file of its own and part of the report: it refers to nothing outside.

use std::fmt::Write;

use crate::results::{Kind, Results};
use crate::stats::Spread;
use crate::table::{cell, losses, number, titled};

const WIDTH: f64 = 620.0;
const LABELS: f64 = 120.0;
const VALUES: f64 = 150.0;
const BAR: f64 = 16.0;
const GAP: f64 = 10.0;
const TOP: f64 = 58.0;
/// Colours of servers, distinct also without red and green; light and dark.
const COLOURS: &[(&str, &str)] = &[
    ("#3b6fb6", "#7aa8e6"),
    ("#d08418", "#f0b357"),
    ("#4c8c7a", "#7cc4b0"),
    ("#9a5aa8", "#cf9bdc"),
    ("#6b6b6b", "#b0b0b0"),
];

/// A plot of one figure of one scenario: a group of bars for each case, a bar for each server.
/// `None` if no server has it.
pub fn bars(results: &Results, scenario: &str, kind: &Kind) -> Option<String> {
    let servers = &results.run.servers;
    let cases: Vec<(String, Vec<Option<Spread>>)> = results
        .rows()
        .into_iter()
        .filter(|(name, _)| name == scenario)
        .map(|(_, case)| {
            let spread = |name: &str| results.spread(name, scenario, &case, kind.name);
            let spreads = servers.iter().map(|server| spread(&server.name)).collect();
            (case, spreads)
        })
        .filter(|(_, spreads): &(_, Vec<Option<Spread>>)| spreads.iter().any(Option::is_some))
        .collect();
    let largest = cases
        .iter()
        .flat_map(|(_, spreads)| spreads.iter().flatten())
        .map(|spread| spread.max)
        .fold(0.0, f64::max);
    if cases.is_empty() || largest <= 0.0 {
        return None;
    }
    let lost = losses(results);
    let plot = WIDTH - LABELS - VALUES;
    let (step, axis) = axis(largest * kind.scale);
    let x = |value: f64| LABELS + value * kind.scale / axis * plot;
    let group = servers.len() as f64 * BAR + GAP;
    let bottom = TOP + cases.len() as f64 * group;
    let height = bottom + 34.0;
    let title = escape(&format!("{scenario}: {}", titled(kind)));
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
         aria-label=\"{title}\">\n{}\n<text class=\"title\" x=\"4\" y=\"18\">{title}</text>\n",
        style()
    );
    let mut line = |text: String| {
        svg += &text;
        svg.push('\n');
    };
    let mut left = 4.0;
    for (number, server) in servers.iter().enumerate() {
        let colour = number % COLOURS.len();
        line(format!(
            "<rect class=\"s{colour}\" x=\"{left}\" y=\"30\" width=\"11\" height=\"11\"/>"
        ));
        line(format!("<text x=\"{}\" y=\"40\">{}</text>", left + 16.0, escape(&server.name)));
        // About the width of the text: there is no font to measure it with.
        left += 36.0 + 7.0 * server.name.chars().count() as f64;
    }
    for mark in 0.. {
        let value = f64::from(mark) * step;
        if value > axis * 1.0001 {
            break;
        }
        let at = LABELS + value / axis * plot;
        line(format!(
            "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{bottom}\"/>\
             <text class=\"mark\" x=\"{at:.1}\" y=\"{}\">{}</text>",
            bottom + 16.0,
            mark_text(value)
        ));
    }
    for (row, (case, spreads)) in cases.iter().enumerate() {
        let top = TOP + row as f64 * group + GAP / 2.0;
        let middle = top + (group - GAP) / 2.0 + 4.0;
        line(format!(
            "<text class=\"case\" x=\"{}\" y=\"{middle:.1}\">{}</text>",
            LABELS - 10.0,
            escape(case)
        ));
        for (number, spread) in spreads.iter().enumerate() {
            let Some(spread) = spread else { continue };
            let (y, colour) = (top + number as f64 * BAR, number % COLOURS.len());
            let end = x(spread.median);
            line(format!(
                "<rect class=\"s{colour}\" x=\"{LABELS}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{}\"/>",
                y + 1.0,
                (end - LABELS).max(0.5),
                BAR - 3.0
            ));
            let (low, high, centre) = (x(spread.min), x(spread.max), y + BAR / 2.0 - 0.5);
            if high - low > 0.5 {
                line(format!(
                    "<path class=\"range\" d=\"M{low:.1} {centre:.1}H{high:.1}M{low:.1} {0:.1}v6\
                     M{high:.1} {0:.1}v6\"/>",
                    centre - 3.0
                ));
            }
            let loss = lost.iter().find(|loss| {
                number == 0
                    && loss.scenario == scenario
                    && loss.case == *case
                    && loss.figure == kind.name
            });
            let (class, mark) = match loss {
                Some(loss) if loss.overlaps => ("value", " ~"),
                Some(_) => ("value loses", " loses"),
                None => ("value", ""),
            };
            line(format!(
                "<text class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\">{}{mark}</text>",
                x(spread.max).max(end) + 6.0,
                y + BAR - 4.0,
                escape(&cell(spread, kind)),
            ));
        }
    }
    svg += "</svg>\n";
    Some(svg)
}

/// The value of a mark, which is round.
fn mark_text(value: f64) -> String {
    let text = number(value);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
}

/// Distance of the marks and the largest value of an axis that holds `largest`.
fn axis(largest: f64) -> (f64, f64) {
    let rough = largest / 4.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .map(|factor| factor * power)
        .into_iter()
        .find(|step| *step >= rough)
        .unwrap_or(10.0 * power);
    (step, (largest / step).ceil() * step)
}

fn style() -> String {
    let mut style = String::from(
        "<style>text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:14px;font-weight:600}\
         .case,.mark{fill:#555}.case{text-anchor:end}.mark{text-anchor:middle;font-size:11px}\
         .value{font-size:11px}.loses{fill:#b3261e;font-weight:600}.grid{stroke:#ddd}\
         .range{stroke:#222;stroke-width:1.2;fill:none}",
    );
    let rules = |out: &mut String, is_dark: bool| {
        for (number, (light, dark)) in COLOURS.iter().enumerate() {
            let colour = if is_dark { dark } else { light };
            write!(out, ".s{number}{{fill:{colour}}}").expect("a string takes all text");
        }
    };
    rules(&mut style, false);
    style += "@media(prefers-color-scheme:dark){text{fill:#ddd}.case,.mark{fill:#aaa}\
              .loses{fill:#ff8a80}.grid{stroke:#3a3a3a}.range{stroke:#eee}";
    rules(&mut style, true);
    style + "}</style>"
}

/// Text as part of XML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::FIGURES;
    use crate::results::tests::example;

    fn plot(name: &str) -> Option<String> {
        let kind = FIGURES.iter().find(|kind| kind.name == name).unwrap();
        bars(&example(), "short", kind)
    }

    #[test]
    fn a_plot_has_a_bar_for_each_server_and_marks_losses() {
        let svg = plot("tokens_per_second").unwrap();
        // Two in the legend, two bars.
        assert_eq!(svg.matches("<rect").count(), 4, "{svg}");
        assert_eq!(svg.matches(" loses</text>").count(), 1, "{svg}");
        assert!(svg.contains("theirs &lt;b&gt;") && !svg.contains("<b>"), "{svg}");
        assert!(plot("ttft_s").unwrap().contains("class=\"range\""));
        assert_eq!(plot("peak_bytes"), None);
    }

    /// The widths of the bars are to each other as the medians are.
    #[test]
    fn bars_are_as_long_as_their_values() {
        let svg = plot("tokens_per_second").unwrap();
        let widths: Vec<f64> = svg
            .lines()
            .filter(|line| line.starts_with("<rect") && line.contains(&format!("x=\"{LABELS}\"")))
            .map(|line| line.split("width=\"").nth(1).unwrap().split('"').next().unwrap())
            .map(|width| width.parse().unwrap())
            .collect();
        assert_eq!(widths.len(), 2);
        assert!((widths[1] / widths[0] - 2.0).abs() < 0.01, "{widths:?}");
    }

    #[test]
    fn an_axis_holds_the_largest_value_in_round_steps() {
        for (largest, expected) in
            [(100.0, (25.0, 100.0)), (7.0, (2.0, 8.0)), (0.011, (0.005, 0.015))]
        {
            let (step, end) = axis(largest);
            assert!(
                (step - expected.0).abs() < 1e-9 && (end - expected.1).abs() < 1e-9,
                "{step} {end}"
            );
        }
    }
}
