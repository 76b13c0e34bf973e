//! RFC 3339 timestamps.

use std::time::{SystemTime, UNIX_EPOCH};

/// Formats a time as RFC 3339 in UTC, with whole seconds.
pub fn timestamp(time: SystemTime) -> String {
    format!("{}Z", date_and_time(since_epoch(time).0, 'T'))
}

/// Formats a time as RFC 3339 in UTC, with milliseconds.
pub fn timestamp_millis(time: SystemTime) -> String {
    let (seconds, millis) = since_epoch(time);
    format!("{}.{millis:03}Z", date_and_time(seconds, 'T'))
}

fn since_epoch(time: SystemTime) -> (i64, u32) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    (seconds, since.subsec_millis())
}

/// Formats date and time of day in UTC; `seconds` are counted from 1970 and may be negative.
pub fn date_and_time(seconds: i64, separator: char) -> String {
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Howard Hinnant's calendar algorithm: years begin in March, so that a leap day is the last day
    // of its year. An era has 400 years.
    let shifted = days + 719_468;
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = (march_month + 2) % 12 + 1;
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}{separator}{hour:02}:{minute:02}:{second:02}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn timestamp_millis_writes_three_digits() {
        let time = UNIX_EPOCH + Duration::from_millis(1_709_210_096_007);
        assert_eq!(timestamp(time), "2024-02-29T12:34:56Z");
        assert_eq!(timestamp_millis(time), "2024-02-29T12:34:56.007Z");
    }
}
