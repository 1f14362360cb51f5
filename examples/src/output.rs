//! Standard output: the text as it is made, or one JSON object. A reader that has gone ends the program quietly.

use crate::program::{Failure, Outcome};
use serde::Serialize;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// Writes text to standard output and flushes it, so that a person sees each piece when it is made.
pub fn write_text(text: &str) -> Outcome<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(output_failure)
}

/// Writes one JSON object and a newline.
pub fn write_json(value: &impl Serialize) -> Outcome<()> {
    let text = serde_json::to_string(value).map_err(|e| Failure::Fault(format!("--json: {e}")))?;
    write_text(&(text + "\n"))
}

/// Whether a file can be written later; it exists and is empty afterwards.
pub fn check_file(path: &Path) -> Outcome<()> {
    std::fs::File::create(path).map(drop).map_err(|e| file_failure(path, &e))
}

/// Writes one JSON object and a newline to a file.
pub fn write_json_file(path: &Path, value: &impl Serialize) -> Outcome<()> {
    let text = serde_json::to_string(value).map_err(|e| Failure::Fault(format!("{}: {e}", path.display())))?;
    std::fs::write(path, text + "\n").map_err(|e| file_failure(path, &e))
}

fn file_failure(path: &Path, error: &std::io::Error) -> Failure {
    Failure::usage(path.display(), format!("cannot be written: {error}, expected a file to write to"))
}

fn output_failure(error: std::io::Error) -> Failure {
    match error.kind() {
        ErrorKind::BrokenPipe => Failure::Closed,
        _ => Failure::Fault(format!("standard output: {error}")),
    }
}
