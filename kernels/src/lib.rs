//! Arithmetic for forebay, on slices.
