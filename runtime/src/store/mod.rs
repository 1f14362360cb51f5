//! The group store.
