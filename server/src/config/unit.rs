//! Sizes and durations with units: `"1GiB"`, `"90s"`. The end of a key says in what its plain numbers are.

use jiff::{Span, SpanRelativeTo};

/// What the numbers of a key are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Keys that end in `_bytes`.
    Bytes,
    /// Keys that end in `_s`.
    Seconds,
    /// Keys that end in `_ms`.
    Milliseconds,
}

/// Bytes of the units of sizes, with the units in lower case.
const SIZES: [(&str, u64); 11] = [
    ("", 1),
    ("b", 1),
    ("kb", 1000),
    ("mb", 1000 * 1000),
    ("gb", 1000 * 1000 * 1000),
    ("tb", 1000 * 1000 * 1000 * 1000),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("pib", 1 << 50),
];

impl Unit {
    /// The unit of the key `name`, if its numbers have one.
    pub fn of(name: &str) -> Option<Self> {
        let (_, end) = name.rsplit_once('_')?;
        match end {
            "bytes" => Some(Self::Bytes),
            "s" => Some(Self::Seconds),
            "ms" => Some(Self::Milliseconds),
            _ => None,
        }
    }

    /// The number that `text` is in this unit: a size or a duration with its unit. `None` if it is neither, is no
    /// whole number of this unit, or is too large.
    pub fn number(self, text: &str) -> Option<u64> {
        match self {
            Self::Bytes => bytes(text),
            Self::Seconds => whole(milliseconds(text)?, 1000),
            Self::Milliseconds => milliseconds(text),
        }
    }

    /// What a value of such a key must be, in words.
    pub fn expected(self) -> &'static str {
        match self {
            Self::Bytes => {
                "bytes as a whole number, not below 0, or a size with its unit as \"512MiB\" or \"1GiB\""
            }
            Self::Seconds => {
                "seconds as a whole number, not below 0, or a duration with its unit as \"90s\" or \"10m\""
            }
            Self::Milliseconds => {
                "milliseconds as a whole number, not below 0, or a duration with its unit as \"250ms\" or \"2s\""
            }
        }
    }
}

/// The bytes of a size as `1.5 GiB`.
fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && !"._".contains(c));
    let (number, unit) = text.split_at(digits.unwrap_or(text.len()));
    let unit = unit.trim().to_ascii_lowercase();
    let (_, factor) = *SIZES.iter().find(|(name, _)| *name == unit)?;
    let (whole_part, fraction) = number.split_once('.').unwrap_or((number, ""));
    let units: u64 = whole_part.replace('_', "").parse().ok()?;
    let bytes = units.checked_mul(factor)?;
    if !number.contains('.') {
        return Some(bytes);
    }
    // Of a fraction, three digits are enough: 1.5 GiB.
    if !(1..=3).contains(&fraction.len()) || factor == 1 {
        return None;
    }
    let thousandths: u64 = format!("{fraction:0<3}").parse().ok()?;
    // Of a power of two, three decimal digits are seldom whole bytes: rounded down.
    let rest = thousandths * (factor / 1000) + thousandths * (factor % 1000) / 1000;
    bytes.checked_add(rest)
}

/// The milliseconds of a duration as `90s` or `1h 30m`. Days have 24 hours.
fn milliseconds(text: &str) -> Option<u64> {
    let span: Span = text.trim().parse().ok()?;
    let duration = span.to_duration(SpanRelativeTo::days_are_24_hours()).ok()?;
    let milliseconds = u64::try_from(duration.as_millis()).ok()?;
    (duration.subsec_nanos() % 1_000_000 == 0).then_some(milliseconds)
}

/// `number / divisor`, if that is whole.
fn whole(number: u64, divisor: u64) -> Option<u64> {
    number.is_multiple_of(divisor).then_some(number / divisor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations_have_units() {
        for (key, text, number) in [
            ("x_bytes", "1GiB", Some(1 << 30)),
            ("x_bytes", " 512 MiB ", Some(512 << 20)),
            ("x_bytes", "1.5GiB", Some(3 << 29)),
            ("x_bytes", "0.1GiB", Some(107_374_182)),
            ("x_bytes", "64kib", Some(64 << 10)),
            ("x_bytes", "8GB", Some(8_000_000_000)),
            ("x_bytes", "4096", Some(4096)),
            ("x_bytes", "16_384 B", Some(16_384)),
            ("x_bytes", "0", Some(0)),
            // An "M" may be either.
            ("x_bytes", "512M", None),
            ("x_bytes", "1.5", None),
            ("x_bytes", "-1GiB", None),
            ("x_bytes", "GiB", None),
            ("x_bytes", "", None),
            ("x_bytes", "1.GiB", None),
            ("x_bytes", "1.2.3GiB", None),
            ("x_bytes", "1,5GiB", None),
            ("x_bytes", "99999999PiB", None),
            ("x_bytes", "99999999999999999999", None),
            ("x_bytes", "10m", None),
            ("x_s", "90s", Some(90)),
            ("x_s", "10m", Some(600)),
            ("x_s", "1h", Some(3600)),
            ("x_s", "1h 30m", Some(5400)),
            ("x_s", "1h30m", Some(5400)),
            ("x_s", "2d", Some(2 * 86_400)),
            ("x_s", "1 week", Some(7 * 86_400)),
            ("x_s", "2000ms", Some(2)),
            ("x_s", "0s", Some(0)),
            ("x_s", "250ms", None),
            ("x_s", "-1s", None),
            ("x_s", "1 month", None),
            ("x_s", "90", None),
            ("x_s", "", None),
            ("x_s", "1GiB", None),
            ("x_ms", "250ms", Some(250)),
            ("x_ms", "2s", Some(2000)),
            ("x_ms", "1us", None),
        ] {
            assert_eq!(Unit::of(key).unwrap().number(text), number, "{key} = {text:?}");
        }
        for key in ["queue", "max_tokens", "models", "responses_days", "s", "bytes"] {
            assert_eq!(Unit::of(key), None, "{key}");
        }
    }
}
