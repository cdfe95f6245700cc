//! Sizes as people write them.

use std::fmt;

/// One KiB and so on: sizes here are binary.
const UNITS: [(&str, u32); 4] = [("K", 10), ("M", 20), ("G", 30), ("T", 40)];

/// A text that is no size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SizeError {
    text: String,
    percent: bool,
    reason: &'static str,
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = if self.percent { " or 40%" } else { "" };
        write!(
            f,
            "'{}' is no size ({}); write bytes like 300000, binary units like 48M or 1.5G \
             (K, M, G, T){percent}",
            self.text, self.reason
        )
    }
}

impl std::error::Error for SizeError {}

/// Parse `300000` (bytes), `48M`, `1.5G`, `2GiB`, or with `whole` given `40%` of it. K, M, G and T
/// are powers of 1024 in either case; fractions of a byte are dropped.
///
/// # Errors
/// [`SizeError`] with the text and the accepted forms.
pub fn parse_size(text: &str, whole: Option<u64>) -> Result<u64, SizeError> {
    let fail = |reason| {
        Err(SizeError {
            text: text.into(),
            percent: whole.is_some(),
            reason,
        })
    };
    let end = text
        .bytes()
        .position(|b| !b.is_ascii_digit() && b != b'.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (units, decimals) = number.split_once('.').unwrap_or((number, ""));
    if units.is_empty() || decimals.contains('.') || number.ends_with('.') {
        return fail("not a number");
    }
    if number.contains('.') && unit.is_empty() {
        return fail("a fraction needs a unit");
    }
    // The value in units of 1 / 10^decimals, so that no float is needed. Ten decimals tell a byte
    // in 8 GiB; the rest can't matter for memory.
    let decimals = &decimals[..decimals.len().min(10)];
    let scale = 10u128.pow(decimals.len() as u32);
    let Some(value) = digits(units)
        .and_then(|n| n.checked_mul(scale))
        .and_then(|n| n.checked_add(digits(decimals)?))
    else {
        return fail("too large");
    };
    let bytes = match unit {
        "" => Some(value),
        "%" => match whole {
            None => return fail("a percentage of what?"),
            Some(whole) => value.checked_mul(u128::from(whole)).map(|v| v / 100),
        },
        _ => {
            let known = UNITS.iter().find(|(name, _)| {
                let (first, rest) = unit.split_at_checked(1).unwrap_or(("", unit));
                first.eq_ignore_ascii_case(name) && (rest.is_empty() || rest == "iB")
            });
            match known {
                None => return fail("unknown unit"),
                Some((_, shift)) => value.checked_mul(1 << shift),
            }
        }
    };
    match bytes.and_then(|b| u64::try_from(b / scale).ok()) {
        Some(bytes) => Ok(bytes),
        None => fail("too large"),
    }
}

/// The number that ASCII digits write; 0 for none. `None` when it is absurd.
fn digits(text: &str) -> Option<u128> {
    match text {
        "" => Some(0),
        // Shorter than what u128 holds, with room for the multiplications above.
        _ if text.trim_start_matches('0').len() <= 24 => text.parse().ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_people_write() {
        let whole = Some(1000);
        for (text, bytes) in [
            ("0", 0),
            ("300000", 300_000),
            ("1K", 1024),
            ("48M", 48 << 20),
            ("48m", 48 << 20),
            ("1.5G", 3 << 29),
            ("2GiB", 2 << 30),
            ("0.5K", 512),
            ("1T", 1 << 40),
            ("40%", 400),
            ("12.5%", 125),
            ("150%", 1500),
            ("0.0001%", 0),
            ("16777215T", 16_777_215 << 40),
            ("18446744073709551615", u64::MAX),
            ("000000000000000000000000000000000001K", 1024),
            ("1.99999999999999999999999999999999999999999K", 2047),
        ] {
            assert_eq!(parse_size(text, whole), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn sizes_that_are_none() {
        for text in [
            "",
            "M",
            "%",
            ".",
            "1.",
            ".5G",
            "1.5",
            "1..5G",
            "-1",
            "+1",
            "1e9",
            "48MB",
            "48 M",
            " 48M",
            "48M ",
            "0x10",
            "16777216T",
            "18446744073709551616",
            "99999999999999999999999999G",
            "9999999999999999999999999999999999999999999999999",
            "１M",
            "1µ",
            "1Kib",
            "1é",
        ] {
            let said = parse_size(text, Some(1000)).expect_err(text).to_string();
            assert!(said.contains(&format!("'{text}'")), "{said}");
            assert!(said.contains("48M") && said.contains("40%"), "{said}");
        }
        let said = parse_size("40%", None).unwrap_err().to_string();
        assert!(!said.contains("or 40%"), "{said}");
    }
}
