//! Parser and applier of patches as models write them: files to add, delete and update, with lines
//! of context instead of line numbers.
//!
//! ```text
//! *** Begin Patch
//! *** Update File: src/main.rs
//! *** Move to: src/app.rs
//! @@ fn main() {
//!      let name = "world";
//! -    println!("hi {name}");
//! +    println!("hello {name}");
//! *** Add File: notes.txt
//! +one line
//! *** Delete File: old.txt
//! *** End Patch
//! ```
//!
//! Parses patches and applies them to text in memory. Does not access files.

use std::fmt::Write as _;
use std::iter::Peekable;

/// Why a patch cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PatchError {
    #[error("line {line} of the patch: {message}")]
    Syntax { line: usize, message: String },
    #[error("{path}: no place found for these lines of hunk {hunk}:\n{lines}")]
    NotFound {
        path: String,
        hunk: usize,
        lines: String,
    },
    #[error("{path}: no line contains `{header}`")]
    HeaderNotFound { path: String, header: String },
}

/// Change of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FilePatch {
    Add {
        path: String,
        content: String,
    },
    Delete {
        path: String,
    },
    Update {
        path: String,
        move_to: Option<String>,
        hunks: Vec<Hunk>,
    },
}

/// Lines to replace with other lines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Hunk {
    /// A line to find first.
    header: Option<String>,
    old: Vec<String>,
    new: Vec<String>,
    /// Whether the lines must be the last ones of the file.
    at_end: bool,
}

const BEGIN: &str = "*** Begin Patch";
const END: &str = "*** End Patch";
const ADD: &str = "*** Add File: ";
const DELETE: &str = "*** Delete File: ";
const UPDATE: &str = "*** Update File: ";
const MOVE: &str = "*** Move to: ";
const END_OF_FILE: &str = "*** End of File";

/// Parses a patch.
pub(crate) fn parse(text: &str) -> Result<Vec<FilePatch>, PatchError> {
    let mut lines = text
        .trim()
        .lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line))
        .peekable();
    match lines.next() {
        Some((_, first)) if first.trim_end() == BEGIN => {}
        _ => return Err(wrong(1, "a patch begins with `*** Begin Patch`")),
    }
    let mut changes = Vec::new();
    loop {
        let Some((number, line)) = lines.next() else {
            let last = text.trim().lines().count();
            return Err(wrong(last, "a patch ends with `*** End Patch`"));
        };
        let line = line.trim_end();
        if line == END {
            break;
        }
        if let Some(path) = line.strip_prefix(ADD) {
            let mut content = String::new();
            while let Some((_, line)) = lines.next_if(|(_, line)| line.starts_with('+')) {
                content.push_str(&line[1..]);
                content.push('\n');
            }
            let path = path.to_owned();
            changes.push(FilePatch::Add { path, content });
        } else if let Some(path) = line.strip_prefix(DELETE) {
            let path = path.to_owned();
            changes.push(FilePatch::Delete { path });
        } else if let Some(path) = line.strip_prefix(UPDATE) {
            changes.push(parse_update(&mut lines, number, path)?);
        } else if !line.is_empty() {
            let message = "expected `*** Add File: `, `*** Delete File: `, `*** Update File: ` or \
                           `*** End Patch`";
            return Err(wrong(number, message));
        }
    }
    if let Some((number, _)) = lines.find(|(_, line)| !line.trim().is_empty()) {
        return Err(wrong(number, "nothing may come after `*** End Patch`"));
    }
    if changes.is_empty() {
        return Err(wrong(1, "the patch changes nothing"));
    }
    Ok(changes)
}

/// Parses what follows the line with `*** Update File: `.
fn parse_update<'a>(
    lines: &mut Peekable<impl Iterator<Item = (usize, &'a str)>>,
    number: usize,
    path: &str,
) -> Result<FilePatch, PatchError> {
    let move_to = lines
        .next_if(|(_, line)| line.starts_with(MOVE))
        .map(|(_, line)| line[MOVE.len()..].trim_end().to_owned());
    let mut hunks: Vec<Hunk> = Vec::new();
    while let Some((number, line)) = lines.next_if(|(_, line)| !is_section(line)) {
        let hunk = match hunks.last_mut() {
            Some(hunk) if !line.starts_with("@@") => hunk,
            _ => {
                hunks.push(Hunk::default());
                // A hunk was pushed just before.
                let Some(hunk) = hunks.last_mut() else { break };
                hunk
            }
        };
        hunk.take(line).map_err(|message| wrong(number, message))?;
    }
    if hunks.is_empty() && move_to.is_none() {
        return Err(wrong(number, "an update needs lines to change"));
    }
    if hunks
        .iter()
        .any(|hunk| hunk.old.is_empty() && hunk.new.is_empty())
    {
        return Err(wrong(number, "the update has a hunk without lines"));
    }
    Ok(FilePatch::Update {
        path: path.to_owned(),
        move_to,
        hunks,
    })
}

fn wrong(line: usize, message: &str) -> PatchError {
    PatchError::Syntax {
        line,
        message: message.to_owned(),
    }
}

/// Whether a line begins another section.
fn is_section(line: &str) -> bool {
    line.starts_with("*** ") && line.trim_end() != END_OF_FILE
}

impl Hunk {
    fn take(&mut self, line: &str) -> Result<(), &'static str> {
        if self.at_end {
            return Err("nothing may follow `*** End of File` in a hunk");
        }
        if line.trim_end() == END_OF_FILE {
            self.at_end = true;
        } else if let Some(header) = line.strip_prefix("@@") {
            let header = header.trim();
            self.header = (!header.is_empty()).then(|| header.to_owned());
        } else {
            let kept = match line.chars().next() {
                // Editors often remove the single space of an empty context line.
                None => "",
                Some(' ') => &line[1..],
                Some('-') => {
                    self.old.push(line[1..].to_owned());
                    return Ok(());
                }
                Some('+') => {
                    self.new.push(line[1..].to_owned());
                    return Ok(());
                }
                Some(_) => return Err("a line of a hunk begins with a blank, `-`, `+` or `@@`"),
            };
            self.old.push(kept.to_owned());
            self.new.push(kept.to_owned());
        }
        Ok(())
    }
}

/// Applies hunks to a text. Line endings stay unchanged.
pub(crate) fn apply(path: &str, text: &str, hunks: &[Hunk]) -> Result<String, PatchError> {
    let line_end = match text.find('\n') {
        Some(at) if text[..at].ends_with('\r') => "\r\n",
        _ => "\n",
    };
    let mut lines: Vec<&str> = text.split('\n').collect();
    // The part after the last line ending is not a line.
    if lines.last() == Some(&"") {
        lines.pop();
    }
    let lines: Vec<&str> = lines
        .into_iter()
        .map(|line| match line_end {
            "\r\n" => line.strip_suffix('\r').unwrap_or(line),
            _ => line,
        })
        .collect();
    let mut result: Vec<&str> = Vec::new();
    let mut at = 0;
    for (number, hunk) in hunks.iter().enumerate() {
        let mut from = at;
        if let Some(header) = &hunk.header {
            let found = lines[at..].iter().position(|line| line.trim() == header);
            let found = found.or_else(|| lines[at..].iter().position(|line| line.contains(header)));
            match found {
                Some(found) => from = at + found + 1,
                // The header may be the first line of the hunk itself, or precede the last change.
                None if hunk.old.is_empty() => {
                    return Err(PatchError::HeaderNotFound {
                        path: path.to_owned(),
                        header: header.clone(),
                    });
                }
                None => {}
            }
        }
        let position = if hunk.old.is_empty() {
            // The hunk only adds lines: after the header, or at the end.
            Some(match hunk.header {
                Some(_) => from,
                None => lines.len(),
            })
        } else {
            // The header may be repeated as the first line of context.
            find(&lines, &hunk.old, from, hunk.at_end)
                .or_else(|| find(&lines, &hunk.old, at, hunk.at_end))
        };
        let Some(position) = position else {
            let mut shown = String::new();
            for line in &hunk.old {
                // Writing to a string cannot fail.
                let _ = writeln!(shown, "{line}");
            }
            return Err(PatchError::NotFound {
                path: path.to_owned(),
                hunk: number + 1,
                lines: shown,
            });
        };
        result.extend(&lines[at..position]);
        result.extend(hunk.new.iter().map(String::as_str));
        at = position + hunk.old.len();
    }
    result.extend(&lines[at..]);
    let mut changed = result.join(line_end);
    if !result.is_empty() && (text.ends_with('\n') || text.is_empty()) {
        changed.push_str(line_end);
    }
    Ok(changed)
}

/// Finds the position of lines: exact match first, then ignoring trailing spaces, then ignoring
/// indentation.
fn find(lines: &[&str], wanted: &[String], from: usize, at_end: bool) -> Option<usize> {
    let last = lines.len().checked_sub(wanted.len())?;
    let exact: fn(&str, &str) -> bool = |line, wanted| line == wanted;
    let ends: fn(&str, &str) -> bool = |line, wanted| line.trim_end() == wanted.trim_end();
    let both: fn(&str, &str) -> bool = |line, wanted| line.trim() == wanted.trim();
    [exact, ends, both].into_iter().find_map(|alike| {
        let stands = |&at: &usize| {
            let here = &lines[at..at + wanted.len()];
            here.iter()
                .zip(wanted)
                .all(|(line, wanted)| alike(line, wanted))
        };
        match at_end {
            true => (from..=last).rev().take(1).find(stands),
            false => (from..=last).find(stands),
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn patched(text: &str, body: &str) -> Result<String, PatchError> {
        let patch = format!("*** Begin Patch\n*** Update File: f\n{body}\n*** End Patch");
        match &parse(&patch)?[..] {
            [FilePatch::Update { hunks, .. }] => apply("f", text, hunks),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn parse_reads_add_delete_update_and_move() {
        let patch = "*** Begin Patch\n*** Add File: a\n+one\n+\n+two\n*** Delete File: b\n\
                     *** Update File: c\n*** Move to: d\n@@ fn x\n keep\n-old\n+new\n\
                     *** Update File: e\n*** Move to: f\n*** End Patch\n";
        let changes = parse(patch).unwrap();
        assert_eq!(
            changes[0],
            FilePatch::Add {
                path: "a".to_owned(),
                content: "one\n\ntwo\n".to_owned()
            }
        );
        assert_eq!(
            changes[1],
            FilePatch::Delete {
                path: "b".to_owned()
            }
        );
        let FilePatch::Update {
            path,
            move_to,
            hunks,
        } = &changes[2]
        else {
            panic!("{changes:?}")
        };
        assert_eq!((path.as_str(), move_to.as_deref()), ("c", Some("d")));
        assert_eq!(hunks[0].header.as_deref(), Some("fn x"));
        assert!(matches!(&changes[3], FilePatch::Update { hunks, .. } if hunks.is_empty()));
    }

    #[test]
    fn apply_replaces_lines_at_their_context() {
        let text = "a\nb\nc\nb\nc\n";
        assert_eq!(patched(text, " b\n-c\n+C").unwrap(), "a\nb\nC\nb\nc\n");
        // The second hunk is searched for after the first.
        let twice = "@@\n b\n-c\n+1\n@@\n b\n-c\n+2";
        assert_eq!(patched(text, twice).unwrap(), "a\nb\n1\nb\n2\n");
        assert_eq!(
            patched(text, " b\n-c\n+C\n*** End of File").unwrap(),
            "a\nb\nc\nb\nC\n"
        );
        assert_eq!(patched(text, "@@ c\n-b\n+B").unwrap(), "a\nb\nc\nB\nc\n");
        assert_eq!(patched(text, "+end").unwrap(), "a\nb\nc\nb\nc\nend\n");
        assert_eq!(patched(text, "@@ a\n+x").unwrap(), "a\nx\nb\nc\nb\nc\n");
        assert_eq!(patched("", "+first").unwrap(), "first\n");
        assert_eq!(patched("only\n", "-only").unwrap(), "");
    }

    #[test]
    fn apply_keeps_line_endings() {
        assert_eq!(
            patched("a\r\nb\r\n", "-b\n+c\n+d").unwrap(),
            "a\r\nc\r\nd\r\n"
        );
        assert_eq!(patched("a\nb", "-b\n+c").unwrap(), "a\nc");
        assert_eq!(patched("a  \n\tb\n", "-a\n-b\n+x").unwrap(), "x\n");
    }

    #[test]
    fn apply_error_names_the_lines_that_were_not_found() {
        let error = patched("a\n", " a\n-zzz\n+b").unwrap_err().to_string();
        assert!(
            error.contains("f: no place") && error.contains("zzz"),
            "{error}"
        );
        let error = patched("a\n", "@@ nowhere\n+b").unwrap_err().to_string();
        assert!(error.contains("`nowhere`"), "{error}");
    }

    #[test]
    fn parse_error_names_the_line() {
        for (patch, line) in [
            ("", 1),
            ("*** Begin Patch", 1),
            ("*** Begin Patch\n*** End Patch", 1),
            ("*** Begin Patch\nhello\n*** End Patch", 2),
            ("*** Begin Patch\n*** Update File: f\n*** End Patch", 2),
            (
                "*** Begin Patch\n*** Update File: f\n-a\nb\n*** End Patch",
                4,
            ),
            ("*** Begin Patch\n*** Update File: f\n@@\n*** End Patch", 2),
            (
                "*** Begin Patch\n*** Delete File: f\n*** End Patch\nmore",
                4,
            ),
            (
                "*** Begin Patch\n*** Update File: f\n-a\n*** End of File\n b\n*** End Patch",
                5,
            ),
        ] {
            match parse(patch) {
                Err(PatchError::Syntax { line: found, .. }) => assert_eq!(found, line, "{patch}"),
                other => panic!("{patch}: {other:?}"),
            }
        }
    }

    proptest! {
        /// No text causes a panic, and the reverse of a one-line change restores the text.
        #[test]
        fn parse_does_not_panic_on_any_text(text in "\\PC{0,200}", noise in "[-+ @*a\n]{0,60}") {
            let _ = parse(&noise);
            let _ = parse(&format!("*** Begin Patch\n*** Update File: f\n{noise}\n*** End Patch"));
            let _ = patched(&text, &noise);
        }

        #[test]
        fn reverse_patch_restores_the_text(lines in prop::collection::vec("[ab ]{0,6}", 1..12), at in 0usize..12) {
            let at = at % lines.len();
            // Each line is unique, so that it can be found again.
            let mut lines = lines;
            lines[at] = "unique".to_owned();
            let text = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
            let there = patched(&text, "-unique\n+other line").unwrap();
            prop_assert!(there.contains("other line"));
            let back = patched(&there, "-other line\n+unique").unwrap();
            prop_assert_eq!(back, text);
        }
    }
}
