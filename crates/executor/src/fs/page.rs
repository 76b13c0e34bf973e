//! Pagination of long listings: limit and cursor.
//!
//! A cursor is the path of the last entry of the previous page, relative to the listed directory.
//! It does not refer to state of this process, so it stays valid across connections and when
//! entries are added or removed.

use exec_server_protocol::chunk::{ByteChunk, encode_into};
use exec_server_protocol::limits::{MAX_CURSOR_BYTES, MAX_PAGE_ENTRIES};

use super::FsError;

/// One page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ListingPage {
    /// Maximum number of entries, 1 to [`MAX_PAGE_ENTRIES`].
    pub(super) limit: usize,
    /// The path of the entry after which the page begins; empty for the first page.
    pub(super) after: Vec<u8>,
}

impl ListingPage {
    /// The page that `limit` and `after` of a request describe; `None` if the request has neither.
    ///
    /// # Errors
    ///
    /// [`FsError::Params`] for a limit out of range, or an invalid cursor.
    pub(super) fn of(limit: Option<usize>, after: Option<&str>) -> Result<Option<Self>, FsError> {
        if limit.is_none() && after.is_none() {
            return Ok(None);
        }
        let limit = limit.unwrap_or(MAX_PAGE_ENTRIES);
        if !(1..=MAX_PAGE_ENTRIES).contains(&limit) {
            return Err(FsError::Params(format!(
                "limit {limit} is not between 1 and {MAX_PAGE_ENTRIES}"
            )));
        }
        let after = match after {
            None => Vec::new(),
            Some(text) => decode(text).ok_or_else(|| {
                FsError::Params("`after` is not the `next` of another page".to_owned())
            })?,
        };
        Ok(Some(Self { limit, after }))
    }
}

/// The cursor after an entry.
pub(super) fn cursor(path: &[u8]) -> String {
    let mut text = Vec::new();
    encode_into(path, &mut text);
    // Base64 is always UTF-8.
    String::from_utf8(text).unwrap_or_default()
}

/// The path in a cursor, if it cannot lead out of the listed directory.
fn decode(text: &str) -> Option<Vec<u8>> {
    if text.len() > MAX_CURSOR_BYTES {
        return None;
    }
    let path = ByteChunk::decode(text)?.0.to_vec();
    let is_name = |name: &[u8]| !matches!(name, b"" | b"." | b"..") && !name.contains(&0);
    path.split(|&byte| byte == b'/')
        .all(is_name)
        .then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursor_round_trips_and_rejects_escaping_paths() {
        for path in [&b"a"[..], b"a/b c/d", b"\xff/\n"] {
            let page = ListingPage::of(None, Some(&cursor(path))).unwrap().unwrap();
            assert_eq!((page.limit, &*page.after), (MAX_PAGE_ENTRIES, path));
        }
        for path in [
            &b""[..],
            b"/",
            b"/a",
            b"a/",
            b"a//b",
            b"..",
            b"a/../b",
            b".",
            b"a\0b",
        ] {
            let refused = ListingPage::of(Some(1), Some(&cursor(path)));
            assert!(matches!(refused, Err(FsError::Params(_))), "{path:?}");
        }
        let long = cursor(&[b'a'; MAX_CURSOR_BYTES]);
        for text in ["?", "YQ", &long] {
            assert!(ListingPage::of(None, Some(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn page_limit_out_of_range_is_rejected() {
        assert_eq!(ListingPage::of(None, None).unwrap(), None);
        for (limit, allowed) in [
            (0, false),
            (1, true),
            (MAX_PAGE_ENTRIES, true),
            (MAX_PAGE_ENTRIES + 1, false),
        ] {
            assert_eq!(
                ListingPage::of(Some(limit), None).is_ok(),
                allowed,
                "{limit}"
            );
        }
    }
}
