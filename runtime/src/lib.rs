//! forebay: a runtime for long-context language models on boards where the KV cache does not fit in memory.
//!
//! [`Engine`] opens a model; [`Session`] is one sequence. A session keeps a low-rank sketch of all keys, the first and the most
//! recent tokens and a buffer of reused groups in memory, and its full KV cache in a [`store`] on disk; each layer's groups are
//! selected one layer ahead, so that the reads overlap compute. `docs/handbook.md` explains the method, `docs/architecture.md`
//! the code.

pub mod cache;
pub mod config;
pub mod engine;
pub mod error;
pub mod model;
pub mod plan;
pub mod sampler;
pub mod session;
pub mod stats;
pub mod store;

pub use engine::{Engine, EngineOptions, KvMemory, SessionOptions};
pub use error::{Error, Result};
pub use session::{CancelHandle, Progress, Session};
pub use stats::SessionStats;
