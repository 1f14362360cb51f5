//! A plain table for people, columns as wide as their contents.

use crate::output::write_text;
use crate::program::Outcome;

/// Rows of text under a header. The first `labels` columns are flush left, numbers flush right.
pub struct Table {
    labels: usize,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column titles.
    pub fn new(labels: usize, titles: &[&str]) -> Table {
        Table { labels, rows: vec![titles.iter().map(|t| t.to_string()).collect()] }
    }

    /// Adds a row of as many cells as there are titles.
    pub fn push(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.rows[0].len());
        self.rows.push(cells);
    }

    /// The table as lines of text, in the form that Markdown reads, too.
    pub fn render(&self) -> String {
        let columns = self.rows[0].len();
        let width = |column: usize| self.rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0).max(3);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for (index, row) in self.rows.iter().enumerate() {
            for (column, cell) in row.iter().enumerate() {
                let w = widths[column];
                let cell = if column < self.labels { format!("| {cell:<w$} ") } else { format!("| {cell:>w$} ") };
                text.push_str(&cell);
            }
            text.push_str("|\n");
            if index == 0 {
                for (column, w) in widths.iter().enumerate() {
                    let dashes = "-".repeat(*w);
                    text.push_str(&if column < self.labels { format!("| {dashes} ") } else { format!("| {dashes}:") });
                }
                text.push_str("|\n");
            }
        }
        text
    }

    /// Writes the table to standard output.
    pub fn write(&self) -> Outcome<()> {
        write_text(&self.render())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(1, &["name", "value"]);
        table.push(vec!["a".into(), "12345.6".into()]);
        assert_eq!(table.render(), "| name |   value |\n| ---- | -------:|\n| a    | 12345.6 |\n");
    }
}
