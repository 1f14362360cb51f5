//! What can be wrong with a model file. Every message is one line that names the file, what was found and what was expected.

use std::path::PathBuf;

use super::gguf::GgufError;

/// An error of opening or using a model file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file could not be opened or mapped.
    #[error("{}: cannot read the model file: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The bytes are not a GGUF file that can be trusted.
    #[error("{}: {problem}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with its bytes.
        #[source]
        problem: GgufError,
    },
    /// A metadata key that must be there is not.
    #[error("{}: metadata key {key:?} is missing, expected {expected}", path.display())]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A metadata key holds a value of another type.
    #[error("{}: metadata key {key:?} holds {found}, expected {expected}", path.display())]
    KeyType {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The type in the file.
        found: String,
        /// The type that is needed.
        expected: &'static str,
    },
    /// A metadata value makes no sense, alone or beside another.
    #[error("{}: metadata key {key:?} is {found}, expected {expected}", path.display())]
    KeyValue {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The value in the file.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// An architecture that is not implemented.
    #[error("{}: architecture {found:?} is not supported, expected one of: {supported}", path.display())]
    Architecture {
        /// The file.
        path: PathBuf,
        /// The name in the file.
        found: String,
        /// The names that are implemented.
        supported: String,
    },
    /// A tensor that the architecture needs is not in the file.
    #[error("{}: tensor {name:?} is missing, expected {expected}", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape.
        expected: String,
    },
    /// A tensor that the architecture does not know: leaving it out would change the result.
    #[error("{}: tensor {name:?} is not part of architecture {architecture}, expected only its own tensors", path.display())]
    UnknownTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The architecture.
        architecture: &'static str,
    },
    /// A tensor of another shape or type than the metadata says.
    #[error("{}: tensor {name:?} is {found}, expected {expected}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape or type in the file.
        found: String,
        /// What the metadata implies.
        expected: String,
    },
    /// The vocabulary, the merges or the special tokens do not make a tokenizer.
    #[error("{}: tokenizer: {problem}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        problem: String,
    },
    /// A text could not be turned into tokens, or tokens into text.
    #[error("tokenizer: {0}")]
    Encode(String),
    /// The chat template does not compile or does not render.
    #[error("chat template: {0}")]
    Template(String),
}

/// The result of everything in [`crate::model`].
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
