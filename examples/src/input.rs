//! Text from files and standard input.

use crate::interrupt;
use crate::program::{Failure, Outcome};
use std::io::{ErrorKind, Read};
use std::path::Path;

/// Largest text that is read: many times what any context holds, and small beside a machine's memory.
pub const TEXT_BYTES_MAX: u64 = 1 << 30;

/// Reads a text, `-` for standard input. A missing file, bytes that are not UTF-8, a NUL and an empty text are errors that name it.
pub fn read_text(path: &Path) -> Outcome<String> {
    let name = if path == Path::new("-") { "standard input".to_string() } else { path.display().to_string() };
    let unreadable = |e: std::io::Error| Failure::usage(&name, format!("cannot be read: {e}, expected a text file"));
    let bytes = if path == Path::new("-") {
        read_all(&mut std::io::stdin().lock(), &name)?
    } else {
        let metadata = std::fs::metadata(path).map_err(unreadable)?;
        if metadata.is_dir() {
            return Err(Failure::usage(&name, "is a directory, expected a text file"));
        }
        read_all(&mut std::fs::File::open(path).map_err(unreadable)?, &name)?
    };
    check_text(&name, bytes)
}

fn read_all(source: &mut dyn Read, name: &str) -> Outcome<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0u8; 1 << 16];
    loop {
        // Not `read_to_end`: it would go on waiting after a signal.
        match source.read(&mut buffer) {
            Ok(0) => return Ok(bytes),
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(Failure::usage(name, format!("cannot be read: {e}, expected text"))),
        }
        interrupt::check()?;
        if bytes.len() as u64 > TEXT_BYTES_MAX {
            return Err(Failure::usage(name, format!("is larger than {TEXT_BYTES_MAX} bytes, expected a text")));
        }
    }
}

fn check_text(name: &str, bytes: Vec<u8>) -> Outcome<String> {
    let text = String::from_utf8(bytes).map_err(|e| {
        let offset = e.utf8_error().valid_up_to();
        Failure::usage(name, format!("is not UTF-8 at byte {offset}, expected a text document"))
    })?;
    if let Some(offset) = text.find('\0') {
        return Err(Failure::usage(name, format!("has a NUL at byte {offset}, expected a text document")));
    }
    if text.trim().is_empty() {
        return Err(Failure::usage(name, "is empty, expected text"));
    }
    // A byte order mark is no part of the text.
    Ok(match text.strip_prefix('\u{feff}') {
        Some(rest) => rest.to_string(),
        None => text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bytes: &[u8]) -> String {
        check_text("file", bytes.to_vec()).unwrap_err().to_string()
    }

    #[test]
    fn what_is_no_text_is_named_with_its_offset() {
        assert!(message(b"abc\xff\xfe").contains("byte 3"));
        assert!(message(b"ab\0c").contains("NUL at byte 2"));
        assert!(message(b"").contains("empty"));
        assert!(message(b" \n\t").contains("empty"));
    }

    #[test]
    fn text_is_taken_as_it_is_but_for_the_byte_order_mark() {
        assert_eq!(check_text("f", "\u{feff}Grüße\n".into()).unwrap(), "Grüße\n");
        assert_eq!(check_text("f", "x\r\ny".into()).unwrap(), "x\r\ny");
    }
}
