//! Rotary position embedding.

use super::arch::{Kernel, Simd, dispatch};
use crate::isa::Isa;

/// Which two elements of a head form a pair that is rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Elements `2i` and `2i + 1` (llama in GGUF files).
    Interleaved,
    /// Elements `i` and `i + rope_dims / 2` (neox form: qwen2 and others).
    Halves,
}

/// Rotation speeds of one model.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Radians per position, `[rope_dims / 2]`.
    speeds: Vec<f64>,
    /// Pairs of a head, of which those beyond `speeds` are not rotated.
    pairs: usize,
}

impl RopeTable {
    /// `head_dim` elements per head, of which the first `rope_dims` are rotated: pair `i` by
    /// `position * linear_scale * freq_base^(-2i / rope_dims) / freq_factors[i]`.
    ///
    /// `freq_factors`: `[rope_dims / 2]`. `linear_scale` is 1 where a model does not stretch positions.
    ///
    /// # Panics
    /// If a dimension is odd, `rope_dims` exceeds `head_dim`, or `freq_factors` has another length.
    pub fn new(
        head_dim: usize,
        rope_dims: usize,
        freq_base: f32,
        freq_factors: Option<&[f32]>,
        linear_scale: f32,
    ) -> RopeTable {
        assert!(
            head_dim.is_multiple_of(2) && rope_dims.is_multiple_of(2) && rope_dims <= head_dim,
            "whole pairs of a head"
        );
        let rotated = rope_dims / 2;
        if let Some(factors) = freq_factors {
            assert_eq!(factors.len(), rotated, "one frequency factor per pair");
        }
        let speeds = (0..rotated).map(|pair| {
            let exponent = -2.0 * pair as f64 / rope_dims as f64;
            let factor = freq_factors.map_or(1.0, |factors| f64::from(factors[pair]));
            f64::from(linear_scale) * f64::from(freq_base).powf(exponent) / factor
        });
        RopeTable { speeds: speeds.collect(), pairs: head_dim / 2 }
    }

    /// Rotated elements of a head.
    pub fn rope_dims(&self) -> usize {
        2 * self.speeds.len()
    }

    /// Cosines and sines of the rotation at `position`, computed in f64; pairs that are not rotated get 1 and 0.
    ///
    /// `cos`, `sin`: `[head_dim / 2]`. Where `rope_dims < head_dim`, [`rope_apply_partial`] takes the first `rope_dims / 2` of each.
    ///
    /// # Panics
    /// If the lengths are not `head_dim / 2`.
    pub fn angles(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        assert!(cos.len() == self.pairs && sin.len() == self.pairs, "one angle per pair");
        cos.fill(1.0);
        sin.fill(0.0);
        for (pair, speed) in self.speeds.iter().enumerate() {
            let (sine, cosine) = (position as f64 * speed).sin_cos();
            cos[pair] = cosine as f32;
            sin[pair] = sine as f32;
        }
    }
}

/// Rotates each head: `(a, b)` becomes `(a cos - b sin, a sin + b cos)` for each pair.
///
/// `x`: `[heads][head_dim]`, `cos`, `sin`: `[head_dim / 2]`. For a model that rotates only the first `rope_dims` of a head see
/// [`rope_apply_partial`].
///
/// # Panics
/// If `x` is not whole heads, or cosines and sines differ in number.
pub fn rope_apply(isa: Isa, style: RopeStyle, x: &mut [f32], cos: &[f32], sin: &[f32]) {
    rope_apply_partial(isa, style, x, 2 * cos.len(), cos, sin);
}

/// Rotates the first `2 * cos.len()` elements of each head and leaves the others.
///
/// `x`: `[heads][head_dim]`, `cos`, `sin`: `[pairs]` with `2 * pairs <= head_dim`.
///
/// # Panics
/// If `x` is not whole heads, or the pairs do not fit.
pub fn rope_apply_partial(isa: Isa, style: RopeStyle, x: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    assert!(cos.len() == sin.len() && 2 * cos.len() <= head_dim, "pairs are inside a head");
    assert!(head_dim > 0 && x.len().is_multiple_of(head_dim), "whole heads");
    match style {
        RopeStyle::Interleaved => {
            for head in x.chunks_exact_mut(head_dim) {
                for (pair, (&c, &s)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                    (pair[0], pair[1]) = (pair[0] * c - pair[1] * s, pair[0] * s + pair[1] * c);
                }
            }
        }
        RopeStyle::Halves => dispatch(isa, RotateHalves { x, head_dim, cos, sin }),
    }
}

struct RotateHalves<'a> {
    x: &'a mut [f32],
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for RotateHalves<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let pairs = self.cos.len();
        for head in self.x.chunks_exact_mut(self.head_dim) {
            let (a, b) = head[..2 * pairs].split_at_mut(pairs);
            let mut i = 0;
            while i + S::LANES <= pairs {
                // SAFETY: all four slices hold `pairs` elements.
                unsafe {
                    let (cos, sin) = (s.load(self.cos.as_ptr().add(i)), s.load(self.sin.as_ptr().add(i)));
                    let (x, y) = (s.load(a.as_ptr().add(i)), s.load(b.as_ptr().add(i)));
                    s.store(a.as_mut_ptr().add(i), s.sub(s.mul(x, cos), s.mul(y, sin)));
                    s.store(b.as_mut_ptr().add(i), s.add(s.mul(x, sin), s.mul(y, cos)));
                }
                i += S::LANES;
            }
            while i < pairs {
                (a[i], b[i]) = (a[i] * self.cos[i] - b[i] * self.sin[i], a[i] * self.sin[i] + b[i] * self.cos[i]);
                i += 1;
            }
        }
    }
}
