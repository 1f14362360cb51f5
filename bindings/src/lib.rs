//! The C ABI of forebay: `libforebay.so`, `libforebay.a` and `forebay.h`.
//!
//! This crate is where the stable C interface will live: opaque handles for model, engine and session, parameter structs
//! that carry their own size, status codes that are never reused, and one `catch_unwind` at every entry. It depends on
//! `forebay` (the runtime) and on nothing that depends on it. It holds no functions yet: the interface is designed and
//! built in one piece, after the engine's own Rust interface has settled.
