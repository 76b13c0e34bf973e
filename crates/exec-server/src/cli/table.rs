//! Formatting of tables, sizes, ages and untrusted text.

use exec_server_protocol::text::shell_quoted;

/// Formats a heading and rows, each column as wide as its widest cell. Each row stays on one line.
pub(super) fn table<Row: AsRef<[String]>>(
    head: &[&str],
    rows: impl IntoIterator<Item = Row>,
) -> String {
    let head = head.iter().map(|&cell| cell.to_owned()).collect();
    let rows = rows.into_iter().map(|row| row.as_ref().to_vec());
    columns([head].into_iter().chain(rows), None)
}

/// Formats rows without a heading. The column with the index `right` is aligned to the right.
pub(super) fn columns(rows: impl IntoIterator<Item = Vec<String>>, right: Option<usize>) -> String {
    let shown = |row: Vec<String>| row.iter().map(|cell| visible(cell)).collect();
    let rows: Vec<Vec<String>> = rows.into_iter().map(shown).collect();
    let mut widths = Vec::new();
    for row in &rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &rows {
        let Some((last, cells)) = row.split_last() else {
            continue;
        };
        let mut line = String::new();
        for (index, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
            line.push_str(&match right == Some(index) {
                true => format!("{cell:>width$}  "),
                false => format!("{cell:width$}  "),
            });
        }
        line.push_str(last);
        // An empty last cell adds no blanks; blanks at the end of a name are kept.
        text.push_str(if last.is_empty() {
            line.trim_end()
        } else {
            &line
        });
        text.push('\n');
    }
    text
}

/// Escapes text of another machine for one line: characters that control a terminal or reorder the
/// line.
pub(super) fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_invisible(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    out
}

/// A word as it can be typed in a shell.
pub(super) fn typed(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+~@:,=%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    shell_quoted(word)
}

/// Control characters, line separators, and marks that change the direction of text.
fn is_invisible(c: char) -> bool {
    let marks = ['\u{61c}', '\u{200e}', '\u{200f}'];
    c.is_control()
        || marks.contains(&c)
        || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A time span in its two largest units.
pub(super) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// A number of bytes in its largest binary unit.
pub(super) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{count} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_aligns_columns_and_leaves_no_blanks_after_an_empty_cell() {
        let rows = [["a", "b\nc"], ["long", ""]].map(|row| row.map(str::to_owned));
        assert_eq!(table(&["X", "Y"], rows), "X     Y\na     b\\nc\nlong\n");
        let rows = [["-", "7 B", "name "], ["-", "16 B", "x"]];
        let rows = rows.map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(columns(rows, Some(1)), "-   7 B  name \n-  16 B  x\n");
    }

    #[test]
    fn visible_escapes_what_controls_a_terminal_or_reorders_a_line() {
        for (text, shown) in [
            ("plain \"quoted\" \\ é", "plain \"quoted\" \\ é"),
            ("a\u{1b}[31m\n", "a\\u{1b}[31m\\n"),
            ("\u{202e}gpj.exe", "\\u{202e}gpj.exe"),
        ] {
            assert_eq!(visible(text), shown);
        }
    }

    #[test]
    fn typed_quotes_only_what_a_shell_would_change() {
        for (word, expected) in [
            ("ws://h:1", "ws://h:1"),
            ("a b", "'a b'"),
            ("it's", r"'it'\''s'"),
            ("", "''"),
        ] {
            assert_eq!(typed(word), expected);
        }
    }

    #[test]
    fn ages_and_sizes_use_the_largest_units() {
        assert_eq!(
            [age(59), age(61), age(90_000)],
            ["59s", "1m01s", "1d01h"].map(str::to_owned)
        );
        assert_eq!(
            [bytes(7), bytes(1536)],
            ["7 B", "1.5 KiB"].map(str::to_owned)
        );
    }
}
