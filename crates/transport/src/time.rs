//! Times as text.

use std::time::{SystemTime, UNIX_EPOCH};

/// A time as RFC 3339 has it: in UTC and whole seconds.
pub fn timestamp(time: SystemTime) -> String {
    format!("{}Z", civil(time).0)
}

/// A time as RFC 3339 has it: in UTC and with milliseconds.
pub fn timestamp_millis(time: SystemTime) -> String {
    let (text, millis) = civil(time);
    format!("{text}.{millis:03}Z")
}

/// Everything down to the second, and the milliseconds.
fn civil(time: SystemTime) -> (String, u32) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs();
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Howard Hinnant's calendar: years begin in March, so that leap days come last.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let text = format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}");
    (text, since.subsec_millis())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn milliseconds_are_told_with_three_digits() {
        let time = UNIX_EPOCH + Duration::from_millis(1_709_210_096_007);
        assert_eq!(timestamp(time), "2024-02-29T12:34:56Z");
        assert_eq!(timestamp_millis(time), "2024-02-29T12:34:56.007Z");
    }
}
