//! Models: GGUF files read in place, what their metadata says, their weights, their tokenizer and their chat template.

pub mod arch;
pub mod chat;
pub mod error;
pub mod gguf;
mod pretokenize;
pub mod tokenizer;
pub mod transformer;
pub mod weights;

pub use arch::{Architecture, ModelConfig, RopeStyle};
pub use chat::{ChatTemplate, Message, encode_chat};
pub use error::ModelError;
pub use gguf::Gguf;
pub use tokenizer::{StreamDecoder, Tokenizer};
pub use weights::{LayerWeights, Model};
