//! Sketch rows and group scores against plain f64 arithmetic on the decoded rows.

mod common;

use common::*;
use forebay_kernels::sketch::{
    BLOCK_ROWS, RANK_MAX, ScoreScratch, SketchQueries, SketchRows, SketchType, group_scores,
};
use forebay_kernels::{Isa, Pool};

for_each_isa!(
    sums_match_for_all_ranks,
    softmax_matches,
    groups_of_any_size,
    tokens_without_rows_join_the_softmax,
    scores_do_not_depend_on_threads,
    rows_that_are_not_numbers_do_not_count,
);

const TYPES: [SketchType; 3] = [SketchType::F16, SketchType::I8, SketchType::I4];

#[test]
fn rows_decode_to_what_was_encoded() {
    let mut random = Random::new(30);
    for ty in TYPES {
        for rank in (0..40).chain([64, 100, RANK_MAX]) {
            let mut rows = SketchRows::new(ty, rank, BLOCK_ROWS + 3);
            for index in [0, 5, BLOCK_ROWS - 1, BLOCK_ROWS + 2] {
                let row: Vec<f32> = random.f32s(rank).iter().map(|x| 5.0 * x).collect();
                let before = rows.clone();
                rows.set(index, &row);
                let mut decoded = Guarded::new(rank, 1, 7.5);
                rows.get(index, decoded.get_mut());
                let largest = row.iter().fold(0.0f64, |largest, x| largest.max(f64::from(x.abs())));
                let step = match ty {
                    SketchType::F16 => 0.0,
                    SketchType::I8 => largest / 127.0,
                    SketchType::I4 => largest / 7.0,
                };
                let expected: Vec<f64> = row.iter().map(|&x| f64::from(x)).collect();
                // Half a step, and the rounding of f16, of the value or of the scale.
                assert_close(decoded.checked(), &expected, |_| 0.5 * step + largest / 1024.0, "decoded row");
                for other in (0..rows.rows()).filter(|&other| other != index) {
                    let (mut now, mut then) = (vec![0.0; rank], vec![0.0; rank]);
                    rows.get(other, &mut now);
                    before.get(other, &mut then);
                    assert_eq!(now, then, "{ty:?} rank {rank}: setting row {index} changed row {other}");
                }
            }
        }
    }
}

#[test]
fn rows_that_are_set_together_are_those_set_one_by_one() {
    let mut random = Random::new(38);
    for ty in TYPES {
        for (rank, range) in [(1, 0..1), (13, 3..200), (48, 64..128), (24, 60..70), (8, 7..7)] {
            let values = random.f32s(200 * rank);
            let mut single = SketchRows::new(ty, rank, 200);
            for row in range.clone() {
                single.set(row, &values[row * rank..(row + 1) * rank]);
            }
            for threads in [1, 2, 7] {
                let mut together = SketchRows::new(ty, rank, 200);
                together.set_all(&Pool::new(threads), range.clone(), |rows, out| {
                    out.copy_from_slice(&values[rows.start * rank..rows.end * rank]);
                });
                assert!(together.as_bytes() == single.as_bytes(), "{ty:?} rank {rank} {range:?} {threads} threads");
            }
        }
    }
}

#[test]
fn sizes_of_rows() {
    let sizes = |ty: SketchType| [1, 7, 8, 9, 48].map(|rank| ty.row_bytes(rank));
    assert_eq!(sizes(SketchType::F16), [2, 14, 16, 18, 96]);
    assert_eq!(sizes(SketchType::I8), [6, 10, 10, 14, 50]);
    assert_eq!(sizes(SketchType::I4), [6, 6, 6, 10, 26]);
    for ty in TYPES {
        for (rank, rows) in [(1, 1), (48, 64), (9, 65), (24, 0)] {
            assert_eq!(SketchRows::new(ty, rank, rows).as_bytes().len(), ty.bytes(rank, rows), "{ty:?} {rank} {rows}");
        }
    }
}

#[test]
fn extreme_rows_are_encoded_to_numbers() {
    for ty in [SketchType::I8, SketchType::I4] {
        for row in [[f32::NAN, 1.0, -1.0], [f32::INFINITY, 0.0, 0.0], [1e30, -1e30, 1.0], [1e-12, 0.0, 0.0], [0.0; 3]] {
            let mut rows = SketchRows::new(ty, 3, 1);
            rows.set(0, &row);
            let mut decoded = [7.5; 3];
            rows.get(0, &mut decoded);
            assert!(decoded.iter().all(|x| x.is_finite()), "{ty:?} {row:?} {decoded:?}");
        }
    }
}

struct Case {
    ty: SketchType,
    rank: usize,
    rows: SketchRows,
    /// `[rows][rank]`, decoded.
    decoded: Vec<f32>,
    /// `[queries][rank]`
    q: Vec<f32>,
    n_rows: usize,
    queries: usize,
}

impl Case {
    fn new(random: &mut Random, ty: SketchType, rank: usize, n_rows: usize, queries: usize) -> Case {
        // There may be more rows than are scored, and what they hold does not count.
        let mut rows = SketchRows::new(ty, rank, n_rows + 10);
        let mut decoded = vec![0.0; n_rows * rank];
        for (row, decoded) in decoded.chunks_mut(rank).enumerate() {
            let size = 0.1 + random.unit().abs();
            let values: Vec<f32> = random.f32s(rank).iter().map(|x| x * size).collect();
            rows.set(row, &values);
            rows.get(row, decoded);
        }
        (n_rows..n_rows + 10).for_each(|row| rows.set(row, &vec![99.0; rank]));
        let factor = 4.0 / (rank as f32).sqrt();
        let q = random.f32s(queries * rank).iter().map(|x| x * factor).collect();
        Case { ty, rank, rows, decoded, q, n_rows, queries }
    }

    /// Scores `[queries][rows]` and the largest error that rounding and the quantised query may cause.
    fn scores(&self) -> (Vec<Vec<f64>>, f64) {
        let mut bound = 0.0f64;
        let scores = self.q.chunks(self.rank).map(|q| {
            let largest = q.iter().fold(0.0f64, |largest, x| largest.max(f64::from(x.abs())));
            let query_step = if self.ty == SketchType::F16 { 0.0 } else { largest / 127.0 };
            let rows = self.decoded.chunks(self.rank).map(|row| {
                let (score, magnitude) = dot(q.iter().map(|&x| f64::from(x)), row.iter().map(|&x| f64::from(x)));
                let sum: f64 = row.iter().map(|x| f64::from(x.abs())).sum();
                bound = bound.max(0.5001 * query_step * sum + magnitude * EPSILON * (self.rank as f64 + 4.0));
                score
            });
            rows.collect()
        });
        (scores.collect(), bound)
    }

    /// Group scores in f64, and the tolerance for the kernel's.
    fn expected(&self, rows_per_group: usize, softmax: bool, extra: Option<&[f32]>) -> (Vec<f64>, f64) {
        let (scores, bound) = self.scores();
        let mut tokens = vec![0.0; self.n_rows];
        let mut largest = 0.0f64;
        for (query, scores) in scores.iter().enumerate() {
            if !softmax {
                tokens.iter_mut().zip(scores).for_each(|(token, score)| *token += score);
                continue;
            }
            let extra =
                extra.map_or((f64::NEG_INFINITY, 0.0), |e| (f64::from(e[2 * query]), f64::from(e[2 * query + 1])));
            let max = scores.iter().copied().fold(extra.0, f64::max);
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum::<f64>() + extra.1 * (extra.0 - max).exp();
            for (token, score) in tokens.iter_mut().zip(scores) {
                *token += (score - max).exp() / total;
                largest = largest.max(*token);
            }
        }
        let groups = tokens.chunks(rows_per_group).map(|group| group.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        let sums = self.queries as f64 * (bound + EPSILON);
        // A weight is wrong by twice the error of scores, relatively, and by the rounding to f16.
        let tolerance = if softmax { largest * (2.0 * bound.exp_m1() + 1.0 / 1024.0) } else { sums };
        (groups.collect(), tolerance)
    }

    fn run(&self, isa: Isa, threads: usize, rows_per_group: usize, softmax: bool, extra: Option<&[f32]>) -> Vec<f32> {
        let pool = Pool::new(threads);
        let mut queries = SketchQueries::new(self.queries + 1, self.rank + 5);
        // The traces of a larger set must not show.
        queries.set(isa, &vec![9.0; (self.queries + 1) * (self.rank + 5)], self.queries + 1, self.rank + 5);
        queries.set(isa, &self.q, self.queries, self.rank);
        let mut scratch = ScoreScratch::new(self.queries, self.n_rows);
        let mut out = Guarded::new(self.n_rows / rows_per_group, 1, 7.5);
        for _ in 0..2 {
            group_scores(
                &pool,
                isa,
                &self.rows,
                self.n_rows,
                rows_per_group,
                &queries,
                softmax,
                extra,
                &mut scratch,
                out.get_mut(),
            );
        }
        out.checked().to_vec()
    }

    fn check(&self, isa: Isa, rows_per_group: usize, softmax: bool, extra: Option<&[f32]>) {
        let (expected, tolerance) = self.expected(rows_per_group, softmax, extra);
        let what = format!(
            "{:?} rank {} rows {} by {rows_per_group}, {} queries, softmax {softmax}",
            self.ty, self.rank, self.n_rows, self.queries
        );
        assert_close(&self.run(isa, 2, rows_per_group, softmax, extra), &expected, |_| tolerance, &what);
    }
}

fn sums_match_for_all_ranks(isa: Isa) {
    let mut random = Random::new(31);
    for ty in TYPES {
        for rank in (1..20).chain([24, 48, 64, 100, 250]) {
            Case::new(&mut random, ty, rank, 70, 1 + rank % 9).check(isa, 1, false, None);
        }
    }
}

fn softmax_matches(isa: Isa) {
    let mut random = Random::new(32);
    for ty in TYPES {
        for (rank, n_rows, queries) in
            [(3, 1, 1), (12, 64, 2), (24, 65, 9), (48, 1500, 14), (33, 2049, 5), (64, 200, 40)]
        {
            Case::new(&mut random, ty, rank, n_rows, queries).check(isa, 1, true, None);
        }
    }
}

fn groups_of_any_size(isa: Isa) {
    let mut random = Random::new(33);
    for rows_per_group in [1, 2, 3, 4, 5, 8, 16, 50, 100, 1100] {
        let case = Case::new(&mut random, SketchType::I4, 16, 2200 / rows_per_group * rows_per_group, 3);
        case.check(isa, rows_per_group, true, None);
        case.check(isa, rows_per_group, false, None);
    }
}

fn tokens_without_rows_join_the_softmax(isa: Isa) {
    let mut random = Random::new(34);
    let case = Case::new(&mut random, SketchType::I8, 16, 100, 5);
    let extra = [0.0, 10.0, 20.0, 1.0, -30.0, 2.0, 1.0, 0.0, f32::NEG_INFINITY, 0.0];
    case.check(isa, 2, true, Some(&extra));
}

fn scores_do_not_depend_on_threads(isa: Isa) {
    let mut random = Random::new(35);
    for ty in TYPES {
        let case = Case::new(&mut random, ty, 24, 3000, 9);
        for softmax in [false, true] {
            let one = case.run(isa, 1, 4, softmax, None);
            for threads in [2, 7] {
                assert_eq!(case.run(isa, threads, 4, softmax, None), one, "{threads} threads");
            }
        }
    }
}

fn rows_that_are_not_numbers_do_not_count(isa: Isa) {
    let mut case = Case::new(&mut Random::new(37), SketchType::I4, 8, 64, 2);
    let clean = case.run(isa, 1, 2, false, None);
    // The scale of row 5 becomes NaN; of rows 8 and 9, one whole group, too. Scales end the block.
    for row in [5, 8, 9] {
        let at = BLOCK_ROWS * SketchType::I4.row_bytes(8) - 2 * (BLOCK_ROWS - row);
        case.rows.as_bytes_mut()[at..at + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    }
    let found = case.run(isa, 1, 2, false, None);
    for group in 0..32 {
        match group {
            2 => assert!(found[2] <= clean[2], "the other row counts"),
            4 => assert_eq!(found[4], f32::NEG_INFINITY),
            _ => assert_eq!(found[group], clean[group]),
        }
    }
}
