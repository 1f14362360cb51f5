//! The best groups by score, without a full sort.

use std::cmp::Ordering;

/// Candidates kept beside the `m` best before the worst of them are thrown out.
const SLACK: usize = 256;
/// Scores compared with the threshold at a time.
const CHUNK: usize = 32;

/// Room that the scratch memory of [`top_groups`] needs so that it allocates nothing.
pub fn top_groups_scratch(m: usize) -> usize {
    m + m.max(SLACK) + CHUNK
}

/// Writes the indices of the `m` highest scores to `out`, ascending; all indices if there are no more than `m`.
///
/// Of equal scores the lower index wins; zeros of both signs are equal, NaN is below all else. `scratch` is cleared first; nothing is allocated if its capacity
/// is at least [`top_groups_scratch`]`(m)` and that of `out` at least `m`.
///
/// One pass that keeps candidates above a threshold, which rises each time the candidates have outgrown their room and the best `m` are picked
/// from them.
///
/// # Panics
/// If there are more than 2^32 scores.
pub fn top_groups(scores: &[f32], m: usize, scratch: &mut Vec<u32>, out: &mut Vec<u32>) {
    assert!(u32::try_from(scores.len()).is_ok(), "indices are 32 bits");
    out.clear();
    scratch.clear();
    if m == 0 {
        return;
    }
    let m = m.min(scores.len());
    let room = m + m.max(SLACK);
    scratch.reserve(room + CHUNK);
    // The m-th best so far; later scores must be above it, as of equal ones the earlier wins.
    let mut threshold = f32::NEG_INFINITY;
    let mut has_threshold = false;
    for (chunk, scores_of_chunk) in scores.chunks(CHUNK).enumerate() {
        let first = (chunk * CHUNK) as u32;
        if has_threshold {
            let mut any = false;
            for &score in scores_of_chunk {
                any |= score > threshold;
            }
            if !any {
                continue;
            }
            for (i, &score) in scores_of_chunk.iter().enumerate() {
                if score > threshold {
                    scratch.push(first + i as u32);
                }
            }
        } else {
            scratch.extend((0..scores_of_chunk.len() as u32).map(|i| first + i));
        }
        if scratch.len() > room {
            keep_best(scores, m, scratch);
            threshold = scores[scratch[m - 1] as usize];
            // Anything but NaN is above NaN, which a comparison with it would not say.
            has_threshold = !threshold.is_nan();
        }
    }
    if scratch.len() > m {
        keep_best(scores, m, scratch);
    }
    out.extend_from_slice(scratch);
    out.sort_unstable();
}

/// Leaves the `m` best candidates, the worst of them last.
fn keep_best(scores: &[f32], m: usize, candidates: &mut Vec<u32>) {
    candidates.select_nth_unstable_by(m - 1, |&a, &b| better(scores, a, b));
    candidates.truncate(m);
}

/// `Less` if group `a` goes before group `b`.
fn better(scores: &[f32], a: u32, b: u32) -> Ordering {
    let (x, y) = (scores[a as usize], scores[b as usize]);
    let by_score = match y.partial_cmp(&x) {
        Some(order) => order,
        None => x.is_nan().cmp(&y.is_nan()),
    };
    by_score.then(a.cmp(&b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sorted(scores: &[f32], m: usize) -> Vec<u32> {
        let mut indices: Vec<u32> = (0..scores.len() as u32).collect();
        let key = |i: u32| {
            if scores[i as usize].is_nan() { f64::NEG_INFINITY } else { f64::from(scores[i as usize]).max(-1e300) }
        };
        indices.sort_by(|&a, &b| key(b).total_cmp(&key(a)).then(a.cmp(&b)));
        indices.truncate(m);
        indices.sort_unstable();
        indices
    }

    fn score() -> impl Strategy<Value = f32> {
        prop_oneof![
            8 => -1.0f32..1.0,
            4 => (0..5i32).prop_map(|x| x as f32),
            1 => Just(f32::NAN),
            1 => Just(f32::INFINITY),
            1 => Just(f32::NEG_INFINITY),
        ]
    }

    proptest! {
        #[test]
        fn equals_a_full_sort(scores in prop::collection::vec(score(), 0..2000), m in 0usize..400) {
            let (mut scratch, mut out) = (Vec::new(), Vec::new());
            top_groups(&scores, m, &mut scratch, &mut out);
            prop_assert_eq!(out, sorted(&scores, m));
        }
    }

    #[test]
    fn rising_scores_and_nan_prefixes_do_not_outgrow_the_scratch() {
        for m in [1, 7, 100, 300] {
            let mut scratch = Vec::with_capacity(top_groups_scratch(m));
            let mut out = Vec::with_capacity(m);
            let (scratch_at, out_at) = (scratch.as_ptr(), out.as_ptr());
            let rising: Vec<f32> = (0..5000).map(|i| i as f32).collect();
            let mut nan_first = vec![f32::NAN; 3000];
            nan_first.extend_from_slice(&rising);
            for scores in [&rising, &nan_first] {
                top_groups(scores, m, &mut scratch, &mut out);
                assert_eq!(out, sorted(scores, m));
                assert_eq!((scratch.as_ptr(), out.as_ptr()), (scratch_at, out_at), "nothing was allocated");
            }
        }
    }

    #[test]
    fn zeros_of_both_signs_are_equal() {
        let (mut scratch, mut out) = (Vec::new(), Vec::new());
        top_groups(&[-0.0, 0.0, -0.0], 2, &mut scratch, &mut out);
        assert_eq!(out, [0, 1]);
    }
}
