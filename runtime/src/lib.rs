//! The forebay engine.

pub mod model;
pub mod sampler;
pub mod store;
