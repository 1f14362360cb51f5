//! Cutting a text that is too long into parts, at the coarsest border that works: paragraph, line, sentence, word, character.

/// Where a text may be cut, coarsest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Border {
    Paragraph,
    Line,
    Sentence,
    Word,
    Character,
}

impl Border {
    fn finer(self) -> Option<Border> {
        match self {
            Border::Paragraph => Some(Border::Line),
            Border::Line => Some(Border::Sentence),
            Border::Sentence => Some(Border::Word),
            Border::Word => Some(Border::Character),
            Border::Character => None,
        }
    }
}

/// Cuts `text` into parts whose sizes under `size` are at most `limit`, about equally large, in order and without a gap: the parts
/// together are the text.
///
/// `size` is a token count or the like; sizes of pieces are added up, so it must not be smaller for a whole than for its pieces
/// by more than the caller's reserve. A single character larger than `limit` is a part of its own. `limit` 0 counts as 1.
pub fn split_text<'t, E>(
    text: &'t str,
    limit: usize,
    size: &mut dyn FnMut(&str) -> Result<usize, E>,
) -> Result<Vec<&'t str>, E> {
    let limit = limit.max(1);
    let mut pieces = Vec::new();
    cut(text, Border::Paragraph, limit, size, &mut pieces)?;
    let total: usize = pieces.iter().map(|p| p.1).sum();
    // Equal parts: a stub at the end would be summarised as if it were as much as the others.
    let target = total.div_ceil(total.div_ceil(limit).max(1));
    let mut parts = Vec::new();
    let (mut start, mut end, mut filled) = (0, 0, 0);
    for (piece, piece_size) in pieces {
        if filled > 0 && (filled + piece_size > limit || filled >= target) {
            parts.push(&text[start..end]);
            (start, filled) = (end, 0);
        }
        end += piece.len();
        filled += piece_size;
    }
    if end > start {
        parts.push(&text[start..end]);
    }
    Ok(parts)
}

/// Consecutive pieces of `text` at `border`; those larger than `limit` are cut at the next finer border.
fn cut<'t, E>(
    text: &'t str,
    border: Border,
    limit: usize,
    size: &mut dyn FnMut(&str) -> Result<usize, E>,
    pieces: &mut Vec<(&'t str, usize)>,
) -> Result<(), E> {
    let mut rest = text;
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(piece_end(rest, border));
        rest = after;
        let piece_size = size(piece)?;
        match border.finer() {
            Some(finer) if piece_size > limit => cut(piece, finer, limit, size, pieces)?,
            _ => pieces.push((piece, piece_size)),
        }
    }
    Ok(())
}

/// End of the first piece of a text that is not empty; white space after a border belongs to the piece before it.
fn piece_end(text: &str, border: Border) -> usize {
    let after = |found: Option<usize>| match found {
        Some(at) => at + text[at..].find(|c: char| !c.is_whitespace()).unwrap_or(text.len() - at),
        None => text.len(),
    };
    match border {
        Border::Paragraph => {
            let empty_line = |&(at, _): &(usize, &str)| {
                let next = &text[at + 1..];
                next.starts_with('\n') || next.starts_with("\r\n")
            };
            after(text.match_indices('\n').find(empty_line).map(|(at, _)| at))
        }
        Border::Line => text.find('\n').map_or(text.len(), |at| at + 1),
        Border::Sentence => sentence_end(text, 0),
        Border::Word => after(text.find(char::is_whitespace)),
        Border::Character => text.chars().next().map_or(0, char::len_utf8),
    }
}

/// The first end of a sentence after byte `from` (a character's border): behind `.`, `!` or `?` that white space follows, and that
/// white space; the text's end where there is none.
pub fn sentence_end(text: &str, from: usize) -> usize {
    let mut ended = false;
    for (index, c) in text[from..].char_indices() {
        let at = from + index;
        if ended && c.is_whitespace() {
            return at + text[at..].find(|c: char| !c.is_whitespace()).unwrap_or(text.len() - at);
        }
        // A quotation mark or bracket after the full stop still belongs to the sentence.
        ended = matches!(c, '.' | '!' | '?') || ended && matches!(c, '"' | '\'' | ')' | ']' | '”' | '’');
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn split(text: &str, limit: usize) -> Vec<&str> {
        let mut size = |piece: &str| Ok::<usize, Infallible>(piece.chars().count());
        split_text(text, limit, &mut size).unwrap_or_else(|e| match e {})
    }

    const TEXT: &str = "First line. Second sentence? \"Yes!\" he said.\nAnother line\n\nA new paragraph, grüßend.\n\n\n  \
                        Averyveryverylongwordwithoutanyborderwhatsoever and more words. 日本語の文章もある\r\n\r\nEnd";

    #[test]
    fn parts_together_are_the_text_whatever_the_limit() {
        for limit in 0..=TEXT.chars().count() + 1 {
            let parts = split(TEXT, limit);
            assert_eq!(parts.concat(), TEXT, "limit {limit}");
            for part in parts {
                assert!(!part.is_empty() && part.chars().count() <= limit.max(1), "limit {limit}: {part:?}");
            }
        }
    }

    #[test]
    fn the_coarsest_border_that_works_is_taken() {
        assert_eq!(split("aaa bbb\n\nccc ddd\n\neee fff", 18), ["aaa bbb\n\nccc ddd\n\n", "eee fff"]);
        assert_eq!(split("aaa bbb\nccc ddd\neee fff", 16), ["aaa bbb\nccc ddd\n", "eee fff"]);
        assert_eq!(split("Aa bb. Cc dd! Ee ff?", 14), ["Aa bb. Cc dd! ", "Ee ff?"]);
        assert_eq!(split("aaa bbb", 4), ["aaa ", "bbb"]);
        assert_eq!(split("abcdef", 4), ["abc", "def"]);
    }

    #[test]
    fn parts_are_about_equal() {
        let text = "word ".repeat(101);
        let sizes: Vec<usize> = split(&text, 100).iter().map(|p| p.len()).collect();
        assert!(sizes.iter().all(|&s| (60..=100).contains(&s)), "{sizes:?}");
    }

    #[test]
    fn nothing_gives_no_parts() {
        assert!(split("", 10).is_empty());
        assert_eq!(split("short", 10), ["short"]);
    }

    #[test]
    fn sentences_end_behind_their_mark_and_white_space() {
        let text = "It cost 3.14 euros. \"Really?\" Yes";
        let first = sentence_end(text, 0);
        assert_eq!(&text[..first], "It cost 3.14 euros. ");
        let second = sentence_end(text, first);
        assert_eq!(&text[first..second], "\"Really?\" ");
        assert_eq!(sentence_end(text, second), text.len());
    }
}
