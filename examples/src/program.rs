//! What every program does the same way: parse, run, and end with one line and an exit code.

use crate::interrupt;
use clap::Parser;
use clap::error::ErrorKind;
use forebay::Error;
use forebay::model::ModelError;
use forebay::sampler::SamplerError;
use forebay::store::StoreError;
use std::io::Write;
use std::panic::AssertUnwindSafe;
use std::process::ExitCode;

/// Why a program ends before its work is done.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Wrong usage or bad input: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// Anything else: exit code 1.
    #[error("{0}")]
    Fault(String),
    /// The user interrupted: exit code 130, nothing is said.
    #[error("interrupted")]
    Interrupted,
    /// Whoever read standard output has gone: exit code 0, nothing is said.
    #[error("standard output was closed")]
    Closed,
}

/// What parts of a program return.
pub type Outcome<T> = Result<T, Failure>;

impl Failure {
    /// Bad input that names its source: `place: what, expected ...`.
    pub fn usage(place: impl std::fmt::Display, what: impl std::fmt::Display) -> Failure {
        Failure::Usage(format!("{place}: {what}"))
    }

    fn exit_code(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Fault(_) => 1,
            Failure::Interrupted => 130,
            Failure::Closed => 0,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let text = error.to_string();
        match error {
            Error::Cancelled => Failure::Interrupted,
            Error::Model(_) | Error::Config { .. } | Error::ConfigFile { .. } | Error::Budget { .. } => {
                Failure::Usage(text)
            }
            Error::ContextFull { .. } | Error::Argument { .. } => Failure::Usage(text),
            Error::Store(
                StoreError::DirAbsent(_)
                | StoreError::DirNotDirectory(_)
                | StoreError::DirNotWritable { .. }
                | StoreError::Setup { .. }
                | StoreError::NoSpace { .. }
                | StoreError::WriteBudget { .. }
                | StoreError::Backend { .. },
            ) => Failure::Usage(text),
            _ => Failure::Fault(text),
        }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Failure {
        Error::from(error).into()
    }
}

impl From<SamplerError> for Failure {
    fn from(error: SamplerError) -> Failure {
        match error {
            SamplerError::Option { .. } => Failure::Usage(format!("option {error}")),
            _ => Failure::Fault(error.to_string()),
        }
    }
}

/// Name of the running program, as error lines begin: the last part of its path.
pub fn name() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    let name = std::path::Path::new(&path).file_name().map(|n| n.to_string_lossy().into_owned());
    name.unwrap_or_else(|| "forebay".into())
}

/// Parses the command line, runs `body` and turns what it returns into the exit code.
pub fn run<A: Parser>(body: fn(A) -> Outcome<()>) -> ExitCode {
    // Errors are written as lines of their own, so that standard error closed early changes nothing.
    let mut logger = env_logger::Builder::new();
    logger.filter_level(log::LevelFilter::Warn).parse_default_env().init();
    let args = match A::try_parse() {
        Ok(args) => args,
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            let _ = e.print();
            return ExitCode::SUCCESS;
        }
        Err(e) => {
            say(&one_line(&e.to_string()));
            return ExitCode::from(2);
        }
    };
    // A panic is a fault like any other: exit code 1. What it says is on standard error already.
    let guarded = |()| std::panic::catch_unwind(AssertUnwindSafe(|| body(args)));
    let outcome = match interrupt::install().map(guarded) {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(_)) => Err(Failure::Fault("internal error, see above".into())),
        Err(failure) => Err(failure),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        // A call that fails because a signal came in the middle of it is an interruption, too.
        Err(_) if interrupt::interrupted() => ExitCode::from(Failure::Interrupted.exit_code()),
        Err(failure) => {
            if let Failure::Usage(text) | Failure::Fault(text) = &failure {
                say(text);
            }
            ExitCode::from(failure.exit_code())
        }
    }
}

/// One line on standard error, `program: text`; a standard error that is closed is nobody to tell.
pub fn say(text: &str) {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let _ = writeln!(std::io::stderr().lock(), "{}: {text}", name());
}

/// The first paragraph of clap's message, without its prefix.
fn one_line(message: &str) -> String {
    let paragraph: Vec<&str> = message.lines().map(str::trim).take_while(|l| !l.is_empty()).collect();
    let text = paragraph.join(" ");
    text.strip_prefix("error: ").unwrap_or(&text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_errors_of_clap_become_one_line() {
        #[derive(Parser, Debug)]
        struct Args {
            #[arg(long)]
            model: String,
        }
        let error = Args::try_parse_from(["program"]).unwrap_err().to_string();
        let line = one_line(&error);
        assert!(line.contains("--model") && !line.contains('\n') && !line.starts_with("error"), "{line}");
        let error = Args::try_parse_from(["program", "--model", "x", "--session", "y"]).unwrap_err().to_string();
        assert!(one_line(&error).contains("--session"), "{error}");
    }

    #[test]
    fn exit_codes_are_those_of_the_contract() {
        assert_eq!(Failure::usage("--context", "0").exit_code(), 2);
        assert_eq!(Failure::from(Error::Cancelled).exit_code(), 130);
        assert_eq!(Failure::from(Error::Internal("x".into())).exit_code(), 1);
        assert_eq!(Failure::from(Error::Budget { given: 1, smallest: 2, context: 3, policy: "full" }).exit_code(), 2);
    }
}
