wc -l <stock.txt >count.txt
