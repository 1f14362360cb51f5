//! Sizes on the command line: `64MiB`, `2GiB`, plain bytes.

/// Suffixes and what they multiply by.
const UNITS: [(&str, u64); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

/// Parses a size in bytes; the suffix may be written in any case.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let expected = || "expected bytes, or a whole number with KiB, MiB, GiB or TiB, for example 64MiB".to_string();
    let digits_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, suffix) = text.split_at(digits_end);
    let count: u64 = digits.parse().map_err(|_| expected())?;
    let suffix = suffix.trim();
    let unit = match suffix {
        "" | "B" => 1,
        _ => UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(suffix)).ok_or_else(expected)?.1,
    };
    count.checked_mul(unit).ok_or_else(|| format!("more than 2^64 bytes: {}", expected()))
}

/// A size for people, with one decimal.
pub fn format_size(bytes: u64) -> String {
    match UNITS.iter().rev().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_written() {
        for (text, bytes) in [
            ("0", 0),
            ("123", 123),
            ("123B", 123),
            ("64MiB", 64 << 20),
            ("64 mib", 64 << 20),
            ("2GiB", 2 << 30),
            ("7KiB", 7 << 10),
            ("1TiB", 1 << 40),
            (" 5 ", 5),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text:?}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "MiB", "-1", "1.5GiB", "64MB", "64M", "full", "1e9", "99999999999999999999", "99999999TiB"] {
            assert!(parse_size(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn sizes_for_people() {
        assert_eq!(format_size(0), "0 B");
        assert_eq!(format_size(1023), "1023 B");
        assert_eq!(format_size(1536), "1.5 KiB");
        assert_eq!(format_size(3 << 30), "3.0 GiB");
    }
}
