//! The one error type of the crate.

use crate::model::ModelError;
use crate::store::StoreError;

/// What can go wrong; each message is one line that says what was found and what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model file or its tokenizer.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The group store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A kernel refused its arguments.
    #[error(transparent)]
    Kernel(#[from] forebay_kernels::KernelError),
    /// A setting is out of range.
    #[error("{field} is {found}: expected {expected}")]
    Config {
        /// The setting.
        field: &'static str,
        /// Its value.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A configuration file cannot be used.
    #[error("{file}: {found}: expected {expected}")]
    ConfigFile {
        /// Path of the file.
        file: String,
        /// What was met.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// The KV memory budget is smaller than the smallest plan.
    #[error(
        "kv-memory is {given} bytes: the smallest that works for {context} tokens with policy {policy} is {smallest} bytes"
    )]
    Budget {
        /// Bytes given.
        given: u64,
        /// Smallest number of bytes that works.
        smallest: u64,
        /// Tokens planned for.
        context: usize,
        /// Policy planned for.
        policy: &'static str,
    },
    /// More tokens than the session has room for.
    #[error("{requested} tokens do not fit a context of {context}")]
    ContextFull {
        /// Tokens wanted.
        requested: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// An argument of a call is not usable.
    #[error("{argument}: {found}: expected {expected}")]
    Argument {
        /// Name of the argument.
        argument: &'static str,
        /// What was given.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Cancelled,
    /// The system gave no memory.
    #[error("out of memory: {what} needs {bytes} bytes")]
    OutOfMemory {
        /// What the memory is for.
        what: &'static str,
        /// Its size.
        bytes: u64,
    },
    /// A fault of forebay itself.
    #[error("internal error: {0}")]
    Internal(String),
}

impl Error {
    pub(crate) fn internal(what: impl Into<String>) -> Error {
        Error::Internal(what.into())
    }

    pub(crate) fn argument(argument: &'static str, found: impl ToString, expected: impl ToString) -> Error {
        Error::Argument { argument, found: found.to_string(), expected: expected.to_string() }
    }
}

/// Result with the crate's error by default.
pub type Result<T, E = Error> = std::result::Result<T, E>;
